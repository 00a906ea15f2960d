"""The Hugging Face hub: its cache where it cannot be reached, and one message where neither helps."""

import contextlib
import functools
import http.client
import math
import os
import ssl
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

from qtrain.core.errors import NotHere, TrainingStopped, UserError, first_line

TIMEOUT = "QTRAIN_HUB_TIMEOUT"
"""Environment variable: seconds to wait for the hub's first answer, 10 by default, and for each request after it."""


def hub_timeout() -> float:
    given = os.environ.get(TIMEOUT, "10")
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 3600:
        raise UserError(f"{TIMEOUT}: {given!r} is not a number of seconds from above 0 to 3600.")
    return seconds


@functools.cache
def hub_reachable() -> bool:
    """Whether the hub answers a request, be it with an error, within `hub_timeout`. If not, the hub libraries are
    switched to offline mode: cached files still load, and a missing one fails at once instead of after minutes of
    retries."""
    import huggingface_hub.constants

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return False
    seconds = hub_timeout()
    # The libraries read their environment at import, which has been: their constants are set as well.
    for name in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):
        if TIMEOUT in os.environ and name not in os.environ:
            os.environ[name] = str(math.ceil(seconds))  # for worker processes
            setattr(huggingface_hub.constants, name, math.ceil(seconds))
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True  # the proxy resolves host names, so a look-up here says nothing
    url = urllib.parse.urlsplit(huggingface_hub.constants.ENDPOINT)
    connect = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = connect(url.hostname or "", url.port, timeout=seconds)
    try:
        connection.request("HEAD", "/")
        connection.getresponse()
        return True
    except ssl.SSLCertVerificationError:
        return True  # it answers; the hub libraries may know its certificate
    except (OSError, http.client.HTTPException):
        pass
    finally:
        connection.close()
    os.environ["HF_HUB_OFFLINE"] = "1"  # for worker processes, and for libraries not imported yet
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    with contextlib.suppress(ImportError):
        import datasets.config

        datasets.config.HF_HUB_OFFLINE = True
    return False


@functools.cache
def _offline_by_setting() -> bool:
    """Whether the user set HF_HUB_OFFLINE, before `hub_reachable` may."""
    import huggingface_hub.constants

    return bool(huggingface_hub.constants.HF_HUB_OFFLINE)


@contextlib.contextmanager
def reaching_hub(flag: str, what: str, fix: str) -> Iterator[None]:
    """Wrap any call that may request `what`, the value of `flag`, from the hub: failures become one UserError with
    `fix`."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    # Before hub_reachable, which may switch to offline itself.
    asked_offline = _offline_by_setting()
    reachable = hub_reachable()
    waited = "" if asked_offline else f" within {hub_timeout():g} s ({TIMEOUT} sets the seconds)"
    unreachable = NotHere(
        f"{flag}: {what} is not in the local cache and the Hugging Face hub could not be reached{waited}. {fix}"
    )
    try:
        yield
    except UserError:
        raise
    except HFValidationError as error:
        raise UserError(f"{flag}: {what} is neither a local path nor a hub id: {error}") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        raise unreachable from None
    except GatedRepoError:
        raise NotHere(
            f"{flag}: {what} is gated on the hub. Accept its terms on its page, then log in with: hf auth login"
        ) from None
    except RepositoryNotFoundError:
        raise UserError(f"{flag}: {what} is not on the hub, or it is private. {fix}") from None
    except EntryNotFoundError as error:
        raise UserError(f"{flag}: {what} lacks a required file: {first_line(error)}") from None
    except (HfHubHTTPError, OSError) as error:  # ConnectionError is an OSError
        if not reachable:
            raise unreachable from None
        raise UserError(f"{flag}: {what} could not be loaded from the hub: {first_line(error)}") from None


def hub_file(repo_id: str, filename: str, flag: str, fix: str, repo_type: str = "model") -> Path:
    """A file of a hub repository, downloaded or from the cache."""
    from huggingface_hub import hf_hub_download

    with reaching_hub(flag, f"{filename} of {repo_id!r}", fix):
        return Path(hf_hub_download(repo_id, filename, repo_type=repo_type))


def check_push(repo_id: str, flag: str) -> None:
    """UserError for a repository that nothing could be uploaded to: a name that is none, no login, no hub."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        raise UserError(f"{flag}: {repo_id!r} is no name of a repository; write OWNER/NAME.") from None
    if get_token() is None:
        raise UserError(f"{flag}: there is no login for the hub; log in with: hf auth login (or set HF_TOKEN).")
    if not hub_reachable():
        raise UserError(f"{flag}: the Hugging Face hub could not be reached; leave {flag} out, and upload later.")


def push_folder(folder: Path, repo_id: str, flag: str) -> str:
    """Upload a folder to the repository, which is made, private, if it is not there. Returns its address."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        made = api.create_repo(repo_id, private=True, exist_ok=True)
        api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message="Upload an export of qtrain")
    except (HfHubHTTPError, OSError) as error:
        raise TrainingStopped(
            f"{flag}: {folder} could not be uploaded to {repo_id}: {first_line(error)}. It is written; upload it with: "
            f"hf upload {repo_id} {folder}"
        ) from None
    return str(made)


HUB_DATASETS = "hf://datasets/"
"""What the path of a folder in a dataset of the hub begins with, as in `datasets` and pandas."""


def hub_folder(path: str, flag: str) -> Path:
    """The local copy of hf://datasets/OWNER/NAME/FOLDER (or a glob of files in it), downloaded or from the cache."""
    from huggingface_hub import snapshot_download

    owner, _, rest = path.removeprefix(HUB_DATASETS).partition("/")
    name, _, inner = rest.strip("/").partition("/")
    if not owner or not name:
        raise UserError(f"{flag}: {path!r} names no dataset; write {HUB_DATASETS}OWNER/NAME/FOLDER.")
    # Without a folder, all that there is: it may be several hundred GB.
    if not inner:
        raise UserError(f"{flag}: {path!r} is a whole repository; name a folder in it: {path.rstrip('/')}/FOLDER.")
    repo = f"{owner}/{name}"
    with reaching_hub(flag, f"{inner} of {repo!r}", "Check the name, or download the folder and give its path."):
        found = Path(snapshot_download(repo, repo_type="dataset", allow_patterns=[inner, f"{inner}/*"]))
    return found / inner
