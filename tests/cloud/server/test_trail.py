"""The trail of requests: live ones always, of the others the latest."""

from collections.abc import Callable

from cloud.engine.api import EngineRequest, Sampling
from cloud.scheduler.types import Admitted, Ended, Request
from cloud.server.call import Call
from cloud.server.refused import CallRefused
from cloud.server.trail import Trail
from headway.outcome import Outcome, Reason, RequestClass


def _nothing(call: Call) -> None:
    del call


def _call(number: int, label: str = "", tenant: str = "acme") -> Call:
    name = f"action-{number}"
    request = Request(name, tenant, RequestClass.INTERACTIVE, 4, 2, deadline_ns=1000)
    on_ended: Callable[[Call], None] = _nothing
    return Call(request, EngineRequest(name, (1,), Sampling()), number, on_ended, label=label)


def _admit(trail: Trail, call: Call) -> None:
    trail.admitted(call, Admitted(call.request.request_id, "r0", call.arrived_ns + 50, 2))


def _end(trail: Trail, call: Call) -> None:
    trail.ended(call, Ended(call.request.request_id, Outcome.COMPLETED))


def test_live_requests_are_kept_and_the_latest_of_the_others() -> None:
    """Room for two that are over: of four the last two are left, and the live one."""
    trail = Trail(most_over=2)
    live = _call(0)
    _admit(trail, live)
    for number in range(1, 5):
        call = _call(number)
        _admit(trail, call)
        _end(trail, call)
    found = [trail.find(f"action-{number}", ["acme"]) is not None for number in range(5)]
    assert found == [True, False, False, True, True]
    _end(trail, live)
    assert trail.find("action-0", ["acme"]) is not None
    assert trail.find("action-3", ["acme"]) is None
    assert len(trail._by_name) == 2


def test_a_label_is_the_newest_request_of_that_name() -> None:
    """The older one goes later, and takes nothing of the newer one along."""
    trail = Trail(most_over=1)
    first, second = _call(1, "r1/obs-1"), _call(2, "r1/obs-1")
    for call in (first, second):
        _admit(trail, call)
    _end(trail, first)
    _end(trail, second)
    newest = trail.find("r1/obs-1", ["acme"])
    assert newest is not None
    assert (newest.request_id, newest.predicted_ns) == ("action-2", 50)
    assert trail.find("action-1", ["acme"]) is None


def test_names_are_looked_up_in_the_tenants_given_alone() -> None:
    """The same label at two tenants is two requests; of several the newest is found."""
    trail = Trail()
    _admit(trail, _call(1, "r1/obs-1", "acme"))
    _admit(trail, _call(2, "r1/obs-1", "night"))
    tenants = {}
    for names in (("acme",), ("night",), ("acme", "night"), ("nobody",), ()):
        found = trail.find("r1/obs-1", names)
        tenants[names] = found.tenant if found is not None else None
    assert tenants == {
        ("acme",): "acme",
        ("night",): "night",
        ("acme", "night"): "night",
        ("nobody",): None,
        (): None,
    }
    assert trail.find("", ["acme"]) is None


def test_what_nobody_can_name_is_not_kept() -> None:
    """Bytes that were no message have neither an id nor a label."""
    trail = Trail()
    trail.refused(RequestClass.BATCH, "acme", CallRefused(Reason.INVALID, "no"), 1)
    assert not trail._by_name
