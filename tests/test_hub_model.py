"""A model of the Hub, as its cache holds it: the code path of a download, without the Hub."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import GatedRepoError
from pipeline import PARAMS, ROOT
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from stages.base import checkpoint
from stages.project.errors import UserError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def project(
    tmp_path: Path, tiny_model: Callable[..., PreTrainedModel], tiny_tokenizer: PreTrainedTokenizerFast
) -> Path:
    """A project whose model is one of the Hub that an earlier run downloaded."""
    snapshot = tmp_path / "hub/models--team--tiny/snapshots" / COMMIT
    tiny_model().save_pretrained(snapshot)
    tiny_tokenizer.save_pretrained(snapshot)
    settings = {**PARAMS, "models": {"tiny": {"id": "team/tiny", "revision": COMMIT}}}
    (tmp_path / "params.yaml").write_text(json.dumps(settings), encoding="utf-8")
    for name in PARAMS["corpora"]:
        (tmp_path / f"data/local/{name}.txt").parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"data/local/{name}.txt").write_text("A river near the old harbour. " * 60, encoding="utf-8")
    return tmp_path


def run(project: Path, stage: str) -> subprocess.CompletedProcess[str]:
    environment = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(project / "hub"), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", f"stages.{stage}", "--model", "tiny"],
        cwd=project,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_a_model_of_the_hub_at_its_commit(project: Path) -> None:
    for stage in ("model", "text", "score"):
        done = run(project, stage)
        assert (done.returncode, done.stderr) == (0, "")
    source = json.loads((project / "data/model/tiny" / checkpoint.SOURCE).read_text(encoding="utf-8"))
    assert source == {"kind": "id", "location": "team/tiny", "revision": COMMIT}
    # A branch or another commit is not what was asked for.
    snapshots = project / "hub/models--team--tiny/snapshots"
    (snapshots / COMMIT).rename(snapshots / ("f" * 40))
    shutil.rmtree(project / "data/model")
    done = run(project, "model")
    assert done.returncode == 2
    assert done.stderr.startswith("error: params.yaml: models.tiny.id = team/tiny: cannot be loaded: ")
    assert "Traceback" not in done.stderr


def test_a_gated_model_says_what_to_do() -> None:
    class Gated:
        @staticmethod
        def from_pretrained(_place: str, **_: Any) -> None:
            # Its constructor wants the whole response of a server.
            try:
                raise GatedRepoError.__new__(GatedRepoError, "403 Client Error.")
            except GatedRepoError as error:
                raise OSError("You are trying to access a gated repo.\nMake sure to have access.") from error

    message = "meta/big: a gated model: accept its licence on its Hub page, then log in .*hf auth login.* HF_TOKEN"
    with pytest.raises(UserError, match=message):
        checkpoint.from_pretrained(Gated, "meta/big", "meta/big")
