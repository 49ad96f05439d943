"""Text to tokens and back: nothing lost, nothing split, nothing smuggled in."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloud.engine.chat_template import ChatMessage, ChatTemplateError
from cloud.engine.errors import CheckpointError
from cloud.engine.tokenizer import FolderTokenizer, action_token_ids, load_tokenizer
from tests.support.small_tokenizer import SPECIAL_TOKENS, write_small_tokenizer

ENDOFTEXT, IM_START, IM_END = 0, 1, 2
VOCABULARY = 3 + 256 + 6


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FolderTokenizer:
    """The small tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_small_tokenizer(folder)
    return load_tokenizer(folder)


@given(text=st.text())
def test_any_text_comes_back_whole(tokenizer: FolderTokenizer, text: str) -> None:
    """A byte-level vocabulary holds every text there is."""
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_long_text_is_read_like_a_short_one(tokenizer: FolderTokenizer) -> None:
    """It takes another way through the library, on which special tokens are text too."""
    text = "<|im_end|> aé日🤖 " * 500
    tokens = tokenizer.encode(text)
    assert min(tokens) > IM_END
    assert tokenizer.decode(tokens) == text


@given(tokens=st.lists(st.integers(0, VOCABULARY - 1)))
def test_text_in_pieces_is_the_text_as_a_whole(
    tokenizer: FolderTokenizer, tokens: list[int]
) -> None:
    """Whatever the tokens, also those that are no UTF-8, and after every one of them."""
    for length in range(len(tokens) + 1):
        detokenizer = tokenizer.detokenizer()
        text = "".join(map(detokenizer.push, tokens[:length])) + detokenizer.finish()
        assert text == tokenizer.decode(tokens[:length])


@given(text=st.text(alphabet="aé日🤖\u200d\u0301", min_size=1))
def test_no_piece_ends_inside_a_character(tokenizer: FolderTokenizer, text: str) -> None:
    """Each piece is a part of the text itself, so no character was ever cut."""
    detokenizer = tokenizer.detokenizer()
    so_far = ""
    for token in tokenizer.encode(text):
        so_far += detokenizer.push(token)
        assert text.startswith(so_far)
    assert detokenizer.finish() == ""
    assert so_far == text


def test_an_incomplete_character_is_shown_as_such_at_the_end(tokenizer: FolderTokenizer) -> None:
    """U+FFFD for each maximal part, as the Unicode standard (3.9) has it."""
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push(token) for token in tokenizer.encode("ok🤖")[:-1]] == [
        "o",
        "k",
        "",
        "",
        "",
    ]
    assert detokenizer.finish() == "\ufffd"


def test_merges_apply(tokenizer: FolderTokenizer) -> None:
    """'hello' is the fourth merge: 3 special tokens and 256 bytes stand before them."""
    assert tokenizer.encode("hello") == (3 + 256 + 3,)


def test_the_names_of_special_tokens_are_text_in_a_prompt(tokenizer: FolderTokenizer) -> None:
    """A prompt cannot speak for the system."""
    text = "a<|im_end|>b<|im_start|>"
    tokens = tokenizer.encode(text)
    assert not {ENDOFTEXT, IM_START, IM_END} & set(tokens)
    assert tokenizer.decode(tokens) == text


def test_a_conversation_follows_the_template(tokenizer: FolderTokenizer) -> None:
    """ChatML, token by token."""
    tokens = tokenizer.encode_chat([ChatMessage("user", "hello")])
    assert tokens == (
        IM_START,
        *tokenizer.encode("user\nhello"),
        IM_END,
        *tokenizer.encode("\n"),
        IM_START,
        *tokenizer.encode("assistant\n"),
    )


@given(
    content=st.lists(
        st.sampled_from([*SPECIAL_TOKENS, "<|", "im_start", "|>", "<", "\ufdd0", "\ufdd1", "x"])
    ).map("".join)
)
def test_no_message_makes_a_special_token(tokenizer: FolderTokenizer, content: str) -> None:
    """Whatever a message holds, the turns stay those of the template, and the
    model reads the message as it was sent.
    """
    tokens = tokenizer.encode_chat([ChatMessage("user", content)])
    assert [t for t in tokens if t <= IM_END] == [IM_START, IM_END, IM_START]
    end = tokens.index(IM_END)
    assert tokenizer.decode(tokens[1:end]) == f"user\n{content}"


def test_special_tokens_have_ids(tokenizer: FolderTokenizer) -> None:
    """Ids by content, and how many there are."""
    assert [tokenizer.token_id(content) for content in SPECIAL_TOKENS] == [0, 1, 2]
    assert tokenizer.token_id("<act_000>") is None
    assert action_token_ids(tokenizer) == ()
    assert tokenizer.vocabulary_tokens == VOCABULARY
    assert tokenizer.longest_token == max(map(len, SPECIAL_TOKENS))
    assert tokenizer.last_text_ids(3) == (264, 263, 262)
    assert tokenizer.last_text_ids(1000) == tuple(range(264, 2, -1))


def test_a_template_in_its_own_file_comes_first(tmp_path: Path) -> None:
    """Newer folders hold chat_template.jinja."""
    write_small_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode_chat([ChatMessage("user", "x")]) == tokenizer.encode("x!")


def test_one_of_several_templates_is_the_default(tmp_path: Path) -> None:
    """Some folders hold a list of named templates."""
    write_small_tokenizer(tmp_path)
    settings = {
        "chat_template": [
            {"name": "tool_use", "template": "tools"},
            {"name": "default", "template": "{{ bos_token }}{{ messages | length }}"},
        ],
        "bos_token": "<|endoftext|>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode_chat([]) == (ENDOFTEXT, *tokenizer.encode("0"))


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10**9) %}x{% endfor %}", "too big"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ],
)
def test_a_template_stays_in_its_sandbox(tmp_path: Path, template: str, complaint: str) -> None:
    """A template is a program from outside; what it may not do is one clear line."""
    write_small_tokenizer(tmp_path, chat_template=template)
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(ChatTemplateError, match=complaint) as caught:
        tokenizer.encode_chat([ChatMessage("user", "hi")])
    assert "\n" not in caught.value.message


def test_a_malformed_template_is_refused_on_loading(tmp_path: Path) -> None:
    """Not only when the first conversation comes."""
    write_small_tokenizer(tmp_path, chat_template="{% for %}")
    with pytest.raises(ChatTemplateError, match="malformed"):
        load_tokenizer(tmp_path)


def test_a_model_without_a_template_has_no_conversations(tmp_path: Path) -> None:
    """A base model says so."""
    write_small_tokenizer(tmp_path, chat_template=None)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        load_tokenizer(tmp_path).encode_chat([ChatMessage("user", "hi")])


def test_an_unreadable_tokenizer_is_one_clear_line(tmp_path: Path) -> None:
    """Missing, or damaged."""
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no such file"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": ')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is not a tokenizer"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_of_another_model_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    """One with an id that the model does not know; fewer than it knows are no fault."""
    for path in tiny_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 600}))
    load_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 513}))
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(tmp_path)
    assert caught.value.message == (
        f"{tmp_path / 'tokenizer.json'}: has tokens up to id 513, the model in config.json knows "
        "513; expected the tokenizer that came with the model"
    )
