"""Stop strings, however the text is cut."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cloud.server.text import StopFilter

TEXT = st.text(alphabet="ab<", max_size=30)


@given(
    text=TEXT,
    stop=st.lists(st.text(alphabet="ab<", min_size=1, max_size=4), max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=10),
)
def test_what_is_told_is_the_text_up_to_the_first_stop_string(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    """Against a plain search in the whole text."""
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[a:b] for a, b in pairwise(edges)] or [""]
    told = StopFilter(stop)
    got = ""
    for index, part in enumerate(parts):
        got += told.push(part, is_last=index == len(parts) - 1)
    found = [text.find(one) for one in stop if one in text]
    assert got == (text[: min(found)] if found else text)
    assert told.is_stopped == bool(found)


def test_beginning_of_a_stop_string_is_held_until_it_is_known() -> None:
    """Nothing that a stop string may yet take back is told."""
    told = StopFilter(["</end>"])
    assert told.push("a<") == "a"
    assert told.push("/e") == ""
    assert told.push("x") == "</ex"
    assert told.push("</end>b") == ""
    assert told.is_stopped
    assert told.push("more", is_last=True) == ""
