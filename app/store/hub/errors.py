"""Converts hub errors to one-line messages that suggest a solution.

Knows: the errors of huggingface_hub. Must not know: the requested files.
"""

import contextlib
import errno
import re
from collections.abc import Generator

from httpx2 import ConnectError, ConnectTimeout
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage] - every failure of the connection
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from app.core.errors import AppError, ErrorKind
from app.store.hub.progress import DownloadStopped
from app.store.model_names import HubName

# user name and password in a URL
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]*@")

# the number of a system error, which precedes its text
_ERROR_NUMBER = re.compile(r"^\[Errno -?\d+\] ")


@contextlib.contextmanager
def translate_hub_errors(name: HubName) -> Generator[None]:
    """Converts every error of huggingface_hub to AppError."""
    try:
        yield
    except DownloadStopped as error:  # another file has already failed
        raise model_error(name, "was not downloaded: the download was stopped") from error
    except (HTTPError, OSError) as error:
        raise _to_app_error(name, error) from error


@contextlib.contextmanager
def translate_response_errors(name: HubName) -> Generator[None]:
    """Raises AppError if the response does not come from a hub, or if the configured URL is
    invalid. Such a response may come from a captive portal."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        why = (
            f"could not be looked up: {_get_endpoint()} returned an invalid response "
            f"({type(error).__name__}: {_format_reason(error)}); check the network, "
            "HF_ENDPOINT and HF_TOKEN"
        )
        raise model_error(name, why) from error


def model_error(name: HubName, why: str) -> AppError:
    return AppError(ErrorKind.MODEL_FILES, f"{name} {why}")


def _to_app_error(name: HubName, error: BaseException) -> AppError:
    where = _get_endpoint()
    match error:
        case GatedRepoError():
            why = (
                f"is gated: accept its conditions at {where}/{name.repo_id}, then set HF_TOKEN to "
                "your access token"
            )
        case RepositoryNotFoundError():
            return AppError(
                ErrorKind.MODEL_NOT_FOUND,
                f"{name} was not found on {where}, or is private: check the name, or set HF_TOKEN "
                "to an access token that may read it",
            )
        case RevisionNotFoundError():
            return AppError(
                ErrorKind.MODEL_NOT_FOUND, f"{name.repo_id} has no revision {name.revision}"
            )
        case OfflineModeIsEnabled():
            why = "needs a download, but HF_HUB_OFFLINE is set: unset it and try again"
        case HfHubHTTPError() if error.response.status_code in (401, 403):
            why = f"cannot be accessed on {where}: set HF_TOKEN to an access token that may read it"
        case HfHubHTTPError():
            why = (
                f"could not be downloaded: {where} returned HTTP {error.response.status_code}; "
                "try again later"
            )
        case LocalEntryNotFoundError() if error.__cause__ is not None:
            return _to_app_error(name, error.__cause__)
        case ConnectError() | ConnectTimeout():
            why = (
                f"could not be downloaded: {where} cannot be reached ({_format_reason(error)}). Is "
                "this machine offline? Check the network, then run the command again: a download "
                "continues where it ended"
            )
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            why = "does not fit on the disk: free some space, or set HF_HOME to another disk"
        case OSError(filename=str(path), strerror=str(reason)):
            why = f"cannot be stored: {path}: {reason}; set HF_HOME to use another folder"
        case _:
            why = (
                f"could not be downloaded from {where} ({_format_reason(error)}): try again to "
                "resume the download"
            )
    return model_error(name, why)


def _get_endpoint() -> str:
    return _CREDENTIALS.sub("", constants.ENDPOINT)


def _format_reason(error: BaseException) -> str:
    """Returns the first line of the error message, without credentials."""
    line = _CREDENTIALS.sub("", str(error)).partition("\n")[0]
    return _ERROR_NUMBER.sub("", line) or type(error).__name__
