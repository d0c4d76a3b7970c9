"""The texts of the embedded default, as its wheels give them. Needs a package index."""

from pathlib import Path

import pytest

from stages import assets
from stages.corpora import documents
from stages.project import params
from stages.wheels import pinned

PROFILE = Path(__file__).parents[1] / "profiles/embedded.yaml"


@pytest.mark.slow
def test_calibration_and_evaluation_articles_are_disjoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = params.load(PROFILE)
    texts = {"wikipedia", "web", "speeches"}
    assert texts <= set(settings.assets)
    assets.bring({name: assets.ALL_ASSETS[name] for name in sorted(texts)}, pinned(assets.PINS))
    found = {name: {document.text for document in documents(corpus, name)} for name, corpus in settings.corpora.items()}
    calibration = found[settings.text.calibration.corpus]
    assert len(calibration) == 150
    for name in settings.text.perplexity.corpora:
        assert len(found[name]) > 20, name
        assert calibration.isdisjoint(found[name]), name
    assert min(map(len, found["wiki"])) >= 1500
    assert min(map(len, calibration)) >= 1500
