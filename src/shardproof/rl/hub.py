"""The final model on the Hugging Face Hub: checked before a run, uploaded after it, and again by hand if that failed."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping
from pathlib import Path

from shardproof.config.output import Output
from shardproof.config.schema import Recipe
from shardproof.errors import ShardproofError, fail
from shardproof.export.manifest import ExportReceipt
from shardproof.export.receipts import write_receipt
from shardproof.findings import Finding
from shardproof.rl.model_card import write_card
from shardproof.rl.place import ADAPTER, MODEL

logger = logging.getLogger(__name__)

_IGNORED = [".*", ".*/*"]  # locks, and what interrupted saves left


def check_hub(output: Output) -> list[Finding]:
    """What would keep the model from being uploaded at the end, as far as that is seen without a network."""
    if output.push_to_hub is None:
        return []
    from huggingface_hub import constants, get_token

    problem = f"output.push_to_hub={output.push_to_hub!r}"
    if constants.HF_HUB_OFFLINE:
        message = f"{problem}: HF_HUB_OFFLINE is set, so nothing can be uploaded."
        fix = "unset HF_HUB_OFFLINE, or leave output.push_to_hub out and run `shardproof push` later"
        return [Finding("C007", "output", message, fix=fix)]
    if get_token() is None:
        message = f"{problem}: this user is not logged in at {constants.ENDPOINT}."
        return [Finding("C007", "output", message, fix="run `hf auth login`, or set HF_TOKEN")]
    return []


def publish(run: Path, recipe: Recipe, receipts: Mapping[str, ExportReceipt]) -> str | None:
    """Put receipt and card beside what a run saved, and upload it if the recipe says so; returns what went wrong.

    The weights are on disk by then: nothing that fails here may cost the run.
    """
    try:
        for name, receipt in receipts.items():
            write_receipt(run / name, receipt)
        for name in receipts:
            write_card(run, run / name, recipe, adapter=name == ADAPTER)
        if recipe.output.push_to_hub is not None:
            url = push_model(run, recipe.output.push_to_hub, recipe.output.hub_private)
            logger.info("uploaded the model to %s", url)
    except ShardproofError as error:
        return str(error)
    except Exception as error:
        return f"the model's card was not written: {type(error).__name__}: {error}"
    return None


def push_model(run: Path, repo: str, private: bool) -> str:
    """Upload a run's model, and its adapter under `adapter/`; returns the address. What fails raises C007."""
    if not (run / MODEL).is_dir():
        fix = "finish the run first: the same `shardproof train` command resumes it"
        raise fail("C001", "hub", f"{run} has no {MODEL}/ to upload.", fix=fix)
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        url = str(api.create_repo(repo, private=private, exist_ok=True))
        logger.info("uploading %s to %s ...", run / MODEL, url)
        for folder, place in ((run / MODEL, None), (run / ADAPTER, ADAPTER)):
            if folder.is_dir():
                message = f"Add {'the adapter' if place else 'the model'}, by shardproof"
                api.upload_folder(
                    repo_id=repo,
                    folder_path=folder,
                    path_in_repo=place,
                    commit_message=message,
                    ignore_patterns=_IGNORED,
                )
    except ShardproofError:
        raise
    except Exception as error:  # of the network, of the Hub, or of the disk
        raise _not_pushed(run, repo, private, error) from error
    return url


def _not_pushed(run: Path, repo: str, private: bool, error: Exception) -> ShardproofError:
    text = " ".join(str(error).split())[:500]
    message = f"{run / MODEL} was not uploaded to {repo}: {type(error).__name__}: {text}."
    command = f"shardproof push {shlex.quote(str(run))} --repo {repo}{'' if private else ' --public'}"
    return fail("C007", "hub", message, fix=f"the model is complete on disk; upload it with: {command}")
