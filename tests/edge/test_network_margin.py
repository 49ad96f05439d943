"""The network's share of a budget, by RFC 6298."""

from edge.network_margin import NetworkMargin

MS = 1_000_000


def test_before_any_answer_only_the_clock_granularity_is_taken_off() -> None:
    """G of RFC 6298: 1 ms."""
    assert NetworkMargin().margin_ns(100 * MS) == 1 * MS


def test_the_first_answer_gives_three_times_its_network_time() -> None:
    """RFC 6298 (2.2): SRTT = R, RTTVAR = R/2, RTO = SRTT + 4·RTTVAR."""
    margin = NetworkMargin()
    margin.observe(round_trip_ns=30 * MS, server_ns=20 * MS)
    assert margin.margin_ns(1_000 * MS) == 30 * MS


def test_later_answers_move_it_by_the_gains_of_the_rfc() -> None:
    """RFC 6298 (2.3): after 8 ms and 16 ms, RTTVAR = 3/4·4 + 1/4·8 = 5, SRTT = 7/8·8 + 2 = 9."""
    margin = NetworkMargin()
    margin.observe(8 * MS, 0)
    margin.observe(16 * MS, 0)
    assert margin.margin_ns(1_000 * MS) == (9 + 4 * 5) * MS


def test_silence_doubles_it_until_the_next_answer() -> None:
    """RFC 6298 (5.5), and one answer undoes the doubling."""
    margin = NetworkMargin()
    margin.observe(8 * MS, 0)
    for expected in (48, 96, 192):
        margin.observe_silence()
        assert margin.margin_ns(1_000 * MS) == expected * MS
    margin.observe(8 * MS, 0)
    assert margin.margin_ns(1_000 * MS) == (8 + 4 * 3) * MS


def test_it_never_takes_more_than_half() -> None:
    """Else it could never learn that the network is quick again."""
    margin = NetworkMargin()
    margin.observe(10_000 * MS, 0)
    for _ in range(100):
        margin.observe_silence()
    assert margin.margin_ns(200 * MS) == 100 * MS


def test_a_server_that_claims_more_time_than_passed_counts_as_no_network_time() -> None:
    """Rounding must not make the margin negative."""
    margin = NetworkMargin()
    margin.observe(5 * MS, 6 * MS)
    assert margin.margin_ns(100 * MS) == 1 * MS
