"""Adapters and the prefix cache, from the settings to a real engine and back."""

from pathlib import Path

import grpc
import pytest
import torch
from safetensors.torch import save_file

from cloud.engine.tiny import write_tiny_checkpoint
from headway.config import Settings, parse_settings
from headway.errors import ConfigError, HeadwayError
from headway.outcome import Reason
from headway.rpc.status import error_from_rpc
from headway.v1 import robot_pb2
from tests.support.running_server import observation, running_server


@pytest.fixture(scope="module")
def adapter_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random adapter of the tiny model's first layer, in PEFT's format."""
    folder = tmp_path_factory.mktemp("act")
    generator = torch.Generator().manual_seed(5)
    prefix = "base_model.model.model.layers.0.mlp.down_proj.lora_"
    tensors = {
        prefix + "A.weight": torch.randn(4, 512, generator=generator),
        prefix + "B.weight": torch.randn(192, 4, generator=generator),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 4}')
    return folder


def _settings(folder: Path, *, action: str = "act", allowed: str = '["*"]') -> Settings:
    return parse_settings(
        f"""
        [server]
        port = 0
        development = true
        [engine]
        kv_tokens = 2048
        adapters = ["act={folder}"]
        [actions]
        chunk_steps = 3
        adapter = "{action}"
        [[tenants]]
        name = "default"
        adapters = {allowed}
        """,
        source="test",
    )


async def _actions(config: Settings) -> list[list[float]]:
    async with running_server(config) as running:
        chunk = await running.next_action(observation("one", budget_s=60.0))
        return [list(step.values) for step in chunk.steps]


async def test_actions_come_from_the_adapter_that_is_set(adapter_folder: Path) -> None:
    """The same observation gives other actions with it than without."""
    with_it = await _actions(_settings(adapter_folder))
    assert len(with_it) == 3
    assert with_it != await _actions(_settings(adapter_folder, action=""))


async def test_a_tenant_that_may_not_use_the_adapter_is_refused(adapter_folder: Path) -> None:
    """By name, and nothing is computed; text, which uses none, is served."""
    async with running_server(_settings(adapter_folder, allowed="[]")) as running:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.next_action(observation("one", budget_s=60.0))
        error = error_from_rpc(caught.value)
        assert error.reason is Reason.PERMISSION_DENIED
        assert "may not use the adapter 'act'" in str(error)
        request = robot_pb2.GenerateRequest(prompt="hello", max_tokens=2)
        assert [message async for message in running.robots.Generate(request)]


async def test_an_adapter_that_does_not_fit_keeps_the_server_from_starting(
    tmp_path: Path,
) -> None:
    """In one line that names the file."""
    with pytest.raises(HeadwayError, match=r"adapter_config\.json: cannot be read") as caught:
        async with running_server(_settings(tmp_path)):
            pass
    assert "\n" not in str(caught.value)


def test_an_adapter_that_is_not_loaded_cannot_be_named(tmp_path: Path) -> None:
    """The settings say which ones there are."""
    with pytest.raises(
        ConfigError, match=r"'fly', which engine\.adapters does not load; it has act"
    ):
        _settings(tmp_path, action="fly")
    with pytest.raises(ConfigError, match="adapters of tenant 'default' has 'fly'"):
        _settings(tmp_path, allowed='["fly"]')
    with pytest.raises(ConfigError, match="must each be NAME=FOLDER, got 'act'"):
        parse_settings('[engine]\nadapters = ["act"]', source="test")


async def test_an_equal_beginning_is_read_from_the_cache(tmp_path: Path) -> None:
    """The second call's summary says so, and its text is the first one's."""
    folder = tmp_path / "tiny"
    write_tiny_checkpoint(folder)
    config = parse_settings(
        f'[server]\nport = 0\ndevelopment = true\n[engine]\nmodel = "{folder}"\ndtype = "float32"',
        source="test",
    )
    request = robot_pb2.GenerateRequest(prompt="wherever you go, there you are" * 3, max_tokens=8)
    texts, cached = [], []
    async with running_server(config) as running:
        for _ in range(2):
            messages = [message async for message in running.robots.Generate(request)]
            texts.append("".join(message.text for message in messages))
            cached.append(messages[-1].summary.cached_tokens)
    # 90 bytes are 90 tokens: five blocks of 16, and ten tokens that fill none.
    assert cached == [0, 80]
    assert texts[0] == texts[1] != ""
