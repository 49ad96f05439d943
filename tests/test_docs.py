"""Documents: what they point to is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page: str) -> None:
    """Every relative link of the pages that a newcomer begins with."""
    text = (ROOT / page).read_text()
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    missing = [link for link in links if not (ROOT / page).parent.joinpath(link).exists()]
    assert missing == []
