"""Train a vision model of timm with low-bit matmuls: plan > model > quantize > optimizer > data > fit > export.

python timm_finetune.py --config configs/digits_int8.json
python timm_finetune.py --model timm/vit_giant_patch14_dinov2.lvd142m --model_kwargs '{"img_size":224}' --compile
"""

import dataclasses
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from qtrain.core.process import prepare_process

prepare_process(script=True)  # before imports that take a while

from qtrain.comm.launch import launch
from qtrain.core.config import parse
from qtrain.core.errors import UserError
from qtrain.core.process import run_script
from qtrain.train.log.start_clock import StartClock
from qtrain.train.log.status import epochs
from qtrain.train.settings.listing import listing
from qtrain.train.settings.resumed_recipe import with_recipe_of_run
from qtrain.train.settings.settings import VisionSettings

if TYPE_CHECKING:
    from qtrain.data.images.images import Images

SCRIPT = Path(__file__).stem
RESISC45 = {"type": "hf_image", "dataset": "timm/resisc45"}


def main(argv: list[str]) -> None:
    train(parse(VisionSettings, with_recipe_of_run(argv, SCRIPT), f"{SCRIPT}.py", partial(listing, vision=True)))


def train(settings: VisionSettings) -> None:
    start = StartClock()
    start.mark("flags")
    if not settings.dry_run:
        launch(settings.gpus, settings.device)  # with --gpus N: N processes of this command, for which this one waits
    # Imported here: torch and what needs it take seconds, which a mistyped flag should not have to wait for.
    from qtrain.data.images.augment import ImageTransform, Mixer, make_augmentation
    from qtrain.data.images.image_loader import BatchMaker, ImageLoader
    from qtrain.data.images.images import check_same_classes, open_images
    from qtrain.models import check_vision_model, export_timm
    from qtrain.train.assembly.assemble import assemble, build_quantized
    from qtrain.train.assembly.prepare import prepare
    from qtrain.train.assembly.vision_architecture import VisionArchitecture
    from qtrain.train.eval.vision import VisionEvaluation
    from qtrain.train.loop import Training
    from qtrain.train.plan.checked_settings import check_settings, count_steps
    from qtrain.train.plan.out_of_memory import explain_out_of_memory
    from qtrain.train.records import log_results
    from qtrain.train.step.cuda_graphs import step_graphs
    from qtrain.train.step.forward import vision_forward
    from qtrain.train.step.step import export_weights

    start.mark("imports")

    # ---- plan: whatever can be refused is refused here, before anything is allocated or written ----------------------
    train_ds = RESISC45 if settings.train_ds is None else settings.train_ds
    if settings.train_ds is None:
        eval_ds = settings.eval_ds or {**RESISC45, "split": "validation"}
        settings = dataclasses.replace(settings, train_ds=train_ds, eval_ds=eval_ds)
    checked = check_settings(settings, SCRIPT)
    micro_batch_size = checked.geometry.micro_batch_size
    augmentation = make_augmentation(settings.augment)
    if augmentation.mixes and micro_batch_size % 2:
        raise UserError(f"--augment: mixup and cutmix need even micro-batches, not {micro_batch_size}.")
    name = check_vision_model(settings.model, settings.model_kwargs or {}, settings.pretrained)
    start.mark("plan")
    images = open_images(train_ds, "--train_ds")
    eval_images = None if settings.eval_ds is None else open_images(settings.eval_ds, "--eval_ds")
    if eval_images is not None:
        check_same_classes(images, eval_images, "--eval_ds")
    per_epoch = steps_per_epoch(settings, images)
    checked = count_steps(checked, settings.n_epochs * per_epoch, per_epoch)
    settings = dataclasses.replace(
        checked.settings_as(VisionSettings), eval_interval=settings.eval_interval or per_epoch
    )
    checked = dataclasses.replace(checked, settings=settings)
    architecture = VisionArchitecture(name, settings.model_kwargs or {}, len(images.classes))
    image = architecture.image
    if augmentation.crop_pct is not None:
        image = {**image, "crop_pct": augmentation.crop_pct}
    transform, mixer = ImageTransform(image, augmentation), Mixer(augmentation, len(images.classes))
    maker = BatchMaker(images, transform, mixer, settings.seed, micro_batch_size, settings.batch_size, checked.dtype)
    for read in filter(None, (images, eval_images)):
        read.check()
    start.mark("data")
    prepared = prepare(checked, architecture, describe_images(images, eval_images, settings))
    settings = prepared.settings_as(VisionSettings)
    print(prepared.text, flush=True)
    if settings.dry_run:
        return
    start.mark("plan")

    with explain_out_of_memory(prepared.plan, settings, prepared.device):
        # ---- model, quantize -----------------------------------------------------------------------------------------
        model, quantized = build_quantized(prepared)

        # ---- optimizer, resume ---------------------------------------------------------------------------------------
        run = assemble(prepared, model, quantized, ema_decay=settings.ema_decay)
    start.mark("model")

    # ---- data --------------------------------------------------------------------------------------------------------
    workers, mesh = settings.num_workers, prepared.mesh
    loader = ImageLoader(maker, num_workers=workers, position=run.state.data, rank=mesh.dp_rank, ranks=mesh.dp_size)
    forward = vision_forward(model)
    read, threads = ImageTransform(image, None), min(max(workers, 4), os.cpu_count() or 1)
    evaluation = VisionEvaluation(model, eval_images, read, micro_batch_size, settings.eval_images, threads)
    start.mark("data")

    # ---- fit: from here on files are written -------------------------------------------------------------------------
    with loader, run.opened_folder(prepared.text) as log:
        graphs = step_graphs(run, forward)
        exit_code = Training(run, prepared.plan, prepared.schedule, forward, loader, evaluation, graphs, start).fit()

        # ---- export --------------------------------------------------------------------------------------------------
        log_results(run)
        if exit_code is not None:
            sys.exit(exit_code)
        if not settings.export:
            return
        folder = run.folder.path / "timm"
        with export_weights(run) as whole:
            if whole is not None:
                kwargs = architecture.constructor_kwargs
                export_timm(model, folder, name=name, kwargs=kwargs, classes=images.classes, image=image)
        log.info("exported    %s (timm.create_model('local-dir:%s', pretrained=True) loads it)", folder, folder)


def describe_images(images: "Images", eval_images: "Images | None", settings: VisionSettings) -> list[str]:
    """The lines of the plan about the data."""
    found = {"train": images, "evaluation": eval_images}
    lines = [f"{use}: {len(s):,} images of {len(s.classes)} classes" for use, s in found.items() if s is not None]
    per_epoch, rest = steps_per_epoch(settings, images), len(images) % settings.batch_size
    left = f", each without {rest:,} images, which are less than a batch" if rest else ""
    return [*lines, f"{epochs(settings.n_steps / per_epoch)} of {per_epoch:,} steps{left}"]


def steps_per_epoch(settings: VisionSettings, images: "Images") -> int:
    """Optimizer steps of a pass over the images. UserError where a batch is more than all of them."""
    per_epoch = len(images) // settings.batch_size
    if not per_epoch:
        raise UserError(f"--batch_size: {settings.batch_size} is more than the {len(images):,} images of --train_ds.")
    return per_epoch


def command() -> None:
    """The console command of an installed package."""
    run_script(main)


if __name__ == "__main__":
    command()
