"""Credentials over real connections: API keys, TLS, client certificates, rotation."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from cloud.server.keys import KeyFile
from edge.client import RobotClient
from edge.observation import Observation
from headway.config import Settings, load_settings
from headway.errors import ConfigError, HeadwayError
from headway.outcome import Reason
from headway.rpc.credentials import Credentials, open_aio_channel
from headway.rpc.errors import PermissionDeniedError, UnauthenticatedError, UnavailableError
from headway.rpc.status import error_from_rpc
from headway.v1 import robot_pb2
from tests.cloud.server.test_session import answer, ask, hello
from tests.support.fifo_policy import FifoPolicy
from tests.support.running_server import (
    RunningServer,
    read_error,
    running_server,
    settings,
)
from tests.support.scripted_engine import ScriptedEngine

SEEN = Observation("obs-1", task="go")


@dataclass
class Files:
    """PEM files of one authority, its server and its clients."""

    folder: Path
    authority: trustme.CA

    @property
    def ca(self) -> str:
        """Of the authority."""
        return str(self.folder / "ca.pem")

    @property
    def tls(self) -> dict[str, str]:
        """Settings of a server with the certificate."""
        return {
            "server__tls__certificate": str(self.folder / "server.pem"),
            "server__tls__private_key": str(self.folder / "server.key"),
        }

    def write_server(self) -> None:
        """A certificate for loopback, new each time."""
        made = self.authority.issue_cert("127.0.0.1", "localhost")
        made.cert_chain_pems[0].write_to_path(str(self.folder / "server.pem"))
        made.private_key_pem.write_to_path(str(self.folder / "server.key"))

    def client(self, *names: str) -> Credentials:
        """A client certificate with these names."""
        made = self.authority.issue_cert(*names)
        certificate, key = self.folder / f"{names[0]}.pem", self.folder / f"{names[0]}.key"
        made.cert_chain_pems[0].write_to_path(str(certificate))
        made.private_key_pem.write_to_path(str(key))
        return Credentials(authorities=self.ca, certificate=str(certificate), private_key=str(key))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """An authority and its server's certificate."""
    made = Files(tmp_path, trustme.CA())
    made.authority.cert_pem.write_to_path(made.ca)
    made.write_server()
    return made


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    """A file of keys."""
    return KeyFile(tmp_path / "keys.json")


def guarded(keys: KeyFile, **overrides: object) -> Settings:
    """A server for two tenants that show keys; "batchers" may do no robots' work."""
    tenants = [
        {"name": "acme", "robots": ["r*"]},
        {"name": "batchers", "classes": ["batch"]},
    ]
    return settings(
        server__development=False, server__keys_file=str(keys.path), tenants=tenants, **overrides
    )


def serving(config: Settings) -> Any:
    """A server that answers at once."""
    return running_server(config, make_engine=ScriptedEngine, policy=FifoPolicy())


async def ask_once(running: RunningServer, credentials: Credentials, robot_id: str = "r1") -> None:
    """One action by the product's own client."""
    address = running.server.address

    def ask_it() -> None:
        with RobotClient.connect(address, robot_id=robot_id, credentials=credentials) as client:
            assert client.next_action(SEEN, budget_s=30.0).observation_id == "obs-1"

    await asyncio.to_thread(ask_it)


async def test_a_key_is_asked_for_and_says_whose_the_call_is(keys: KeyFile) -> None:
    """No key: UNAUTHENTICATED. A tenant without the class, a robot of others: PERMISSION_DENIED."""
    key, batch_key = keys.issue("acme"), keys.issue("batchers")
    async with serving(guarded(keys)) as running:
        await ask_once(running, Credentials(api_key=key))
        for credentials, robot_id, error in (
            (Credentials(), "r1", UnauthenticatedError),
            (Credentials(api_key=key + "x"), "r1", UnauthenticatedError),
            (Credentials(api_key=batch_key), "r1", PermissionDeniedError),
            (Credentials(api_key=key), "x1", PermissionDeniedError),
        ):
            with pytest.raises(error):
                await ask_once(running, credentials, robot_id)


async def test_a_session_of_anothers_robot_never_begins(keys: KeyFile) -> None:
    """The hello is refused with a status."""
    metadata = Credentials(api_key=keys.issue("acme")).metadata
    async with serving(guarded(keys)) as running:
        stream = running.robots.Session(metadata=metadata)
        await stream.write(hello("x1"))
        error = await read_error(stream)
    assert (type(error), error.reason) == (PermissionDeniedError, Reason.PERMISSION_DENIED)


async def test_a_key_that_ends_ends_its_streams(keys: KeyFile, monkeypatch: Any) -> None:
    """A session is told UNAUTHENTICATED at its next word; others go on."""
    monkeypatch.setattr("cloud.server.keys._LOOK_EVERY_NS", 0)
    old, other = keys.issue("acme"), keys.issue("acme")
    async with serving(guarded(keys)) as running:
        streams = []
        for number, key in enumerate((old, other)):
            stream = running.robots.Session(metadata=Credentials(api_key=key).metadata)
            await stream.write(hello(f"r{number}"))
            assert (await answer(stream)).HasField("settings")
            streams.append(stream)
        keys.revoke(old.split("_")[1])
        for stream in streams:
            await stream.write(ask("obs-1"))
        error = await read_error(streams[0])
        assert (type(error), error.reason) == (UnauthenticatedError, Reason.UNAUTHENTICATED)
        assert (await answer(streams[1])).action.observation_id == "obs-1"
        streams[1].cancel()


async def test_a_silent_stream_of_a_key_that_ends_is_ended_too(
    keys: KeyFile, monkeypatch: Any
) -> None:
    """By the server's own watch, not by what the client sends."""
    monkeypatch.setattr("cloud.server.keys._LOOK_EVERY_NS", 0)
    key = keys.issue("acme")
    async with serving(guarded(keys, server__heartbeat_interval_s=0.05)) as running:
        stream = running.robots.Session(metadata=Credentials(api_key=key).metadata)
        await stream.write(hello("r1"))
        assert (await answer(stream)).HasField("settings")
        keys.revoke(key.split("_")[1])
        assert isinstance(await read_error(stream), UnauthenticatedError)


async def test_a_text_of_a_key_that_ends_stops(keys: KeyFile, monkeypatch: Any) -> None:
    """No token is told after it."""
    monkeypatch.setattr("cloud.server.keys._LOOK_EVERY_NS", 0)
    key = keys.issue("acme")
    engine = ScriptedEngine()
    engine.pace = asyncio.Semaphore(2)
    async with running_server(
        guarded(keys), make_engine=lambda: engine, policy=FifoPolicy()
    ) as running:
        stream = running.robots.Generate(
            robot_pb2.GenerateRequest(prompt="once", max_tokens=1000),
            metadata=Credentials(api_key=key).metadata,
        )
        assert await stream.read() is not grpc.aio.EOF
        keys.revoke(key.split("_")[1])
        engine.pace.release()
        error = await read_error(stream)
    assert isinstance(error, UnauthenticatedError)
    assert running.server.dispatcher.num_live == 0


async def test_tls_is_spoken_and_the_clear_is_not(files: Files, keys: KeyFile) -> None:
    """A client that does not encrypt, or trusts nobody that vouches for it, gets nothing."""
    key = keys.issue("acme")
    async with serving(guarded(keys, **files.tls)) as running:
        await ask_once(running, Credentials(api_key=key, authorities=files.ca))
        for credentials in (Credentials(api_key=key), Credentials(api_key=key, uses_tls=True)):
            async with open_aio_channel(running.server.address, credentials) as channel:
                call: Any = channel.unary_unary("/headway.v1.RobotService/NextAction")
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(b"", timeout=30, metadata=credentials.metadata)
                assert isinstance(error_from_rpc(caught.value), UnavailableError)


async def test_a_client_certificate_is_a_credential(files: Files) -> None:
    """By its names; one of another authority does not get through the handshake."""
    tenants = [{"name": "acme", "subject_names": ["acme.example"]}, {"name": "bolt"}]
    config = settings(
        server__development=False,
        server__tls__client_authorities=files.ca,
        tenants=tenants,
        **files.tls,
    )
    async with serving(config) as running:
        await ask_once(running, files.client("acme.example"))
        with pytest.raises(UnauthenticatedError, match="no credential"):
            await ask_once(running, files.client("bolt.example"))
        folder = files.folder / "other"
        folder.mkdir()
        stranger = Files(folder, trustme.CA()).client("acme.example")
        credentials = Credentials(
            authorities=files.ca,
            certificate=stranger.certificate,
            private_key=stranger.private_key,
        )
        async with open_aio_channel(running.server.address, credentials) as channel:
            call: Any = channel.unary_unary("/headway.v1.RobotService/NextAction")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"", timeout=30)
        assert isinstance(error_from_rpc(caught.value), UnavailableError)


async def test_a_new_certificate_is_taken_without_a_restart(files: Files, keys: KeyFile) -> None:
    """A connection after the change sees the new one; half a change keeps the old one."""
    key = keys.issue("acme")
    async with serving(guarded(keys, **files.tls)) as running:
        await ask_once(running, Credentials(api_key=key, authorities=files.ca))
        (files.folder / "server.key").write_text("half")
        await ask_once(running, Credentials(api_key=key, authorities=files.ca))
        # Another authority: who trusts only it can be served only by the new certificate.
        files.authority = trustme.CA()
        files.authority.cert_pem.write_to_path(files.ca)
        files.write_server()
        await ask_once(running, Credentials(api_key=key, authorities=files.ca))


@pytest.mark.parametrize(
    ("damaged", "key", "text"),
    [
        ("server.pem", "certificate", None),
        ("server.pem", "certificate", "no PEM"),
        ("server.key", "private_key", None),
        ("server.key", "certificate", "no PEM"),
        ("ca.pem", "client_authorities", None),
        ("ca.pem", "client_authorities", "no PEM"),
    ],
)
async def test_files_that_do_not_fit_are_one_line_and_serve_nothing(
    files: Files, damaged: str, key: str, text: str | None
) -> None:
    """Named, before anything is told to be ready."""
    path = files.folder / damaged
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    config = settings(
        server__development=False, server__tls__client_authorities=files.ca, **files.tls
    )
    with pytest.raises(ConfigError) as caught:
        async with serving(config):
            pass
    assert f"server.tls.{key}" in caught.value.message
    assert "\n" not in caught.value.message


async def test_a_key_of_another_certificate_is_said_so(files: Files) -> None:
    """Both files are whole, and do not belong together."""
    other = files.authority.issue_cert("127.0.0.1")
    other.private_key_pem.write_to_path(str(files.folder / "server.key"))
    with pytest.raises(ConfigError, match="belongs to"):
        async with serving(settings(**files.tls)):
            pass


def test_a_key_never_crosses_a_network_in_the_clear() -> None:
    """Refused before a connection is made; on this machine, or with TLS, it may."""
    credentials = Credentials(api_key="hw_1_2")
    with pytest.raises(HeadwayError, match="in the clear"):
        RobotClient.connect("robots.example.com:50051", credentials=credentials)
    RobotClient.connect("127.0.0.1:50051", credentials=credentials).close()
    secured = Credentials(api_key="hw_1_2", uses_tls=True)
    RobotClient.connect("robots.example.com:50051", credentials=secured).close()
    assert "hw_1_2" not in repr(credentials)


def test_half_a_tls_section_is_refused() -> None:
    """By the settings, with the name of what is missing."""
    for given in ({"certificate": "c"}, {"private_key": "k"}, {"client_authorities": "a"}):
        with pytest.raises(ConfigError, match="certificate"):
            load_settings(None, {"server.tls": given})
