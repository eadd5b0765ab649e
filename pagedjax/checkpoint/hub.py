"""A model from the Hugging Face hub, through huggingface-hub and its cache."""

from __future__ import annotations

from pathlib import Path

from pagedjax.checkpoint.base import CheckpointNotFoundError
from pagedjax.errors import CheckpointError

# What a FolderCheckpoint and its tokenizer read; no pickles, no other frameworks' weights.
_ALLOW = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
# Sub-folders hold the same weights in other formats, but for further chat templates.
_IGNORE = ["*/*.json", "*/*.safetensors", "*/*/*", "consolidated*.safetensors"]


def download(model_id: str, revision: str | None = None) -> Path:
    """The folder of a hub model, downloaded unless huggingface-hub's cache has it.

    Args:
      model_id: ``"owner/name"``.
      revision: branch, tag or commit; by default the main branch.

    Raises:
      CheckpointNotFoundError: no such model, or no network and nothing in the cache. The message names the id and what to do.
      CheckpointError: no access, no such revision, or not a hub id.
    """
    import huggingface_hub  # slow to import, and only hub ids need it
    from huggingface_hub import errors

    name = f"{model_id!r}" + (f" at revision {revision!r}" if revision else "")
    here = f"no local file or folder has that name, and the hub model {name}"
    try:
        return Path(huggingface_hub.snapshot_download(model_id, revision=revision, allow_patterns=_ALLOW, ignore_patterns=_IGNORE))
    except errors.GatedRepoError as error:
        raise CheckpointError(f"{here} is gated: accept its licence on its hub page, then set HF_TOKEN or run `hf auth login`") from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{here} has no such revision: check the branch, tag or commit") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointNotFoundError(
            f"{here} does not exist or is private: check the spelling, or set HF_TOKEN for a private model"
        ) from error
    except errors.HFValidationError as error:
        raise CheckpointError(f"{here} is not a valid hub id: {_first_line(error)}") from error
    except Exception as error:  # huggingface-hub, its HTTP client and its transfer plug-in raise from unrelated hierarchies
        raise CheckpointNotFoundError(
            f"{here} could not be downloaded ({type(error).__name__}: {_first_line(error)}): check the network and HF_HUB_OFFLINE, "
            "or download the model elsewhere and give the path of its folder"
        ) from error


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else "no message"
