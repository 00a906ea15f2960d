"""Train a vision model of timm with low-bit matmuls: plan > model > quantize > optimizer > data > fit > export.

python timm_finetune.py --config configs/digits_int8.json
python timm_finetune.py --model timm/vit_giant_patch14_dinov2.lvd142m --model_kwargs '{"img_size":224}' --compile
"""

import dataclasses
import os
from pathlib import Path

from qtrain.config import parse, run_script
from qtrain.data import (
    BatchMaker,
    ImageLoader,
    Images,
    ImageTransform,
    Mixer,
    check_same_classes,
    make_augmentation,
    open_images,
)
from qtrain.errors import UserError
from qtrain.hardware import describe_hardware
from qtrain.models import (
    build_vision_model,
    check_vision_model,
    compile_vision,
    empty_vision_model,
    export_timm,
    image_config,
    output_head,
    recompute_blocks,
    repeated_blocks,
    vision_cost,
)
from qtrain.optim import OPTIMIZERS, make_schedule, parameter_groups
from qtrain.quant import SCHEMES, describe_choices, exported_tensors, quantize_linears
from qtrain.train.cuda_graphs import step_graphs
from qtrain.train.eval.vision import VisionEvaluation, vision_forward
from qtrain.train.in_backward import check_in_backward
from qtrain.train.listing import listing
from qtrain.train.log.report import write_report
from qtrain.train.log.status import FILE_ONLY, setup_log
from qtrain.train.log.trackers import check_trackers
from qtrain.train.loop import Training, explain_out_of_memory
from qtrain.train.plan.auto_scheme import resolve_auto_scheme
from qtrain.train.plan.vision_plan import make_vision_plan
from qtrain.train.settings import VisionSettings, batch_geometry, choose_device, choose_dtype
from qtrain.train.state.ema import Ema
from qtrain.train.state.run import Run, find_run_folder
from qtrain.train.state.state_dict import seed_rng
from qtrain.train.state.train_state import TrainState
from qtrain.train.step import eval_weights

SCRIPT = Path(__file__).stem
RESISC45 = {"type": "hf_image", "dataset": "timm/resisc45"}


def main(argv: list[str]) -> None:
    if "--list" in argv:
        print(listing())
        return
    settings = parse(VisionSettings, argv, f"{SCRIPT}.py")

    # ---- plan: whatever can be refused is refused here, before anything is allocated or written ----------------------
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    geometry = batch_geometry(settings)
    scheme = SCHEMES.make(settings.quantize, settings.quantize_kwargs or {}, "--quantize")
    optimizer_spec = OPTIMIZERS.make(settings.optim, settings.optim_kwargs or {}, "--optim")
    schedule = make_schedule(settings.lr_schedule_kwargs)
    augmentation = make_augmentation(settings.augment)
    if augmentation.mixes and geometry.micro_batch_size % 2:
        raise UserError(f"--augment: mixup and cutmix need even micro-batches, not {geometry.micro_batch_size}.")
    check_in_backward(settings, geometry, optimizer_spec)
    check_trackers(settings.trackers)
    folder = find_run_folder(settings, SCRIPT)
    model_kwargs = settings.model_kwargs or {}
    name = check_vision_model(settings.model, model_kwargs, settings.pretrained)

    train_ds, eval_ds = settings.train_ds, settings.eval_ds
    if train_ds is None:
        train_ds, eval_ds = RESISC45, eval_ds or {**RESISC45, "split": "validation"}
    images = open_images(train_ds, "--train_ds")
    eval_images = None if eval_ds is None else open_images(eval_ds, "--eval_ds")
    if eval_images is not None:
        check_same_classes(images, eval_images, "--eval_ds")
    settings = count_steps(dataclasses.replace(settings, train_ds=train_ds, eval_ds=eval_ds), images)

    shape = empty_vision_model(name, model_kwargs, len(images.classes))
    image = image_config(shape, model_kwargs)
    transform = ImageTransform(image, augmentation)
    if augmentation.crop_pct is not None:
        image = {**image, "crop_pct": augmentation.crop_pct}
    maker = BatchMaker(
        images,
        transform,
        Mixer(augmentation, len(images.classes)),
        settings.seed,
        geometry.micro_batch_size,
        settings.batch_size,
    )
    images.read(0)
    cost = vision_cost(shape, output_head(shape), image["input_size"])
    settings, scheme, choice = resolve_auto_scheme(
        settings,
        scheme,
        lambda: shape,
        tokens=geometry.micro_batch_size * (cost.rows if cost else 1),
        geometry=geometry,
        dtype=dtype,
        device=device,
        resumed_from=folder.resumed_from,
        head=output_head,
    )
    plan = make_vision_plan(
        settings,
        shape,
        output_head(shape),
        cost,
        scheme,
        optimizer_spec,
        geometry,
        describe_hardware(device),
        dtype,
        data=tuple(
            f"{flag}: {len(found):,} images of {len(found.classes)} classes"
            for flag, found in (("train", images), ("evaluation", eval_images))
            if found is not None
        ),
        blocks=len(repeated_blocks(shape)),
        ema=settings.ema_decay > 0,
    )
    planned = "\n".join([*plan.lines(), *choice])
    print(planned, flush=True)
    if settings.dry_run:
        return

    with explain_out_of_memory(plan, settings, device):
        # ---- model ---------------------------------------------------------------------------------------------------
        seed_rng(settings.seed)
        model = build_vision_model(
            name, model_kwargs, len(images.classes), pretrained=settings.pretrained, device=device, dtype=dtype
        )

        # ---- quantize ------------------------------------------------------------------------------------------------
        quantized = quantize_linears(
            model,
            scheme,
            seed=settings.seed,
            head=output_head(model),
            quantize_head=settings.quantize_lm_head,
            min_size=settings.quantize_min_size,
        )
        swapped = "\n".join(["linears", *describe_choices(quantized.choices)])
        if cost and cost.bypassed and quantized.linears:
            swapped += f"\n{len(cost.bypassed):4d} of these run in high precision: the model reads their weights itself"
        print(swapped, flush=True)
        recompute_blocks(model, settings.activation_checkpointing)
        if settings.compile:
            compile_vision(model)

        # ---- optimizer -----------------------------------------------------------------------------------------------
        optimizer = optimizer_spec.build(
            parameter_groups(model, settings.weight_decay), settings.lr, seed=settings.seed
        )
        quantized.watch(optimizer)
        ema = Ema(model, settings.ema_decay) if settings.ema_decay else None
        run = Run(settings, SCRIPT, folder, device, model, quantized, optimizer, TrainState(), ema)
        run.restore()

    # ---- data --------------------------------------------------------------------------------------------------------
    loader = ImageLoader(maker, "--train_ds", num_workers=settings.num_workers, position=run.state.data)
    evaluation = VisionEvaluation(
        model,
        eval_images,
        ImageTransform(image, None),
        geometry.micro_batch_size,
        settings.eval_images,
        threads=min(max(settings.num_workers, 4), os.cpu_count() or 1),
    )

    # ---- fit: from here on files are written -------------------------------------------------------------------------
    forward = vision_forward(model)
    with loader:
        run.open_folder()
        log = setup_log(folder.path)
        log.info("%s\n%s", planned, swapped, extra=FILE_ONLY)
        log.info("run folder  %s", folder.path)
        graphs = step_graphs(settings, model, forward, quantized)
        finished = Training(run, plan, schedule, forward, loader, evaluation, graphs).fit()

    # ---- export ------------------------------------------------------------------------------------------------------
    log.info("report      %s", write_report(folder.path))
    if settings.keep_ckpts:
        log.info("checkpoint  %s", run.checkpoints.latest())
    if finished:
        exported = folder.path / "timm"
        with eval_weights(optimizer, quantized, ema):
            tensors = exported_tensors(model)
            export_timm(model, tensors, exported, name=name, kwargs=model_kwargs, classes=images.classes, image=image)
        log.info("exported    %s (timm.create_model('local-dir:%s', pretrained=True) loads it)", exported, exported)


def count_steps(settings: VisionSettings, images: Images) -> VisionSettings:
    """The settings with `n_steps` and `eval_interval` worked out from epochs."""
    per_epoch = len(images) // settings.batch_size
    if not per_epoch:
        raise UserError(f"--batch_size: {settings.batch_size} is more than the {len(images):,} images of --train_ds.")
    by_epochs = settings.n_epochs * per_epoch
    if settings.n_steps and by_epochs and settings.n_steps != by_epochs:
        raise UserError(
            f"--n_steps, --n_epochs: {settings.n_epochs} epochs are {by_epochs:,} steps, not {settings.n_steps:,}; "
            "give one of them, and 0 for the other."
        )
    n_steps = settings.n_steps or by_epochs or per_epoch
    return dataclasses.replace(settings, n_steps=n_steps, eval_interval=settings.eval_interval or per_epoch)


if __name__ == "__main__":
    run_script(main)
