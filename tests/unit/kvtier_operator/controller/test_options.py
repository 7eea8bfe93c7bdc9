"""Unit tests of the flags of `kvtier operator`."""

from __future__ import annotations

import pytest
from kvtier_operator.controller.options import Defaults, Options, parse_options
from kvtier_operator.errors import MachineError

HERE = Defaults(namespace="ops", identity="host_1", host="127.0.0.1")


def options(*argv: str) -> Options:
    return parse_options(argv, HERE)


def problems(*argv: str) -> str:
    with pytest.raises(MachineError) as caught:
        options(*argv)
    return "\n".join(caught.value.problems)


def test_without_flags_it_serves_all_namespaces_and_takes_part_in_the_election() -> None:
    found = options()
    assert (found.namespaces, found.operator_namespace, found.identity) == ((), "ops", "host_1")
    assert (found.leader_election, found.workers, found.metrics_port, found.liveness_port) == (True, 4, 8080, 8081)


def test_flags_may_be_spelled_with_either_line() -> None:
    assert options("--operator-namespace=a") == options("--operator_namespace=a")
    assert options("--dry-run", "f.yaml").dry_run == options("--dry_run=f.yaml").dry_run == "f.yaml"


def test_namespaces_are_collected_once_each() -> None:
    assert options("--namespace=a", "--namespace", "b", "--namespace=a").namespaces == ("a", "b")


def test_all_bad_flags_are_named_at_once() -> None:
    said = problems("--workers=0", "--metrics_port=x", "--namespace=Bad", "--surprise", "--identity=")
    for word in ("--workers=0", "--metrics_port=x", "--namespace=Bad", "--surprise", "--identity="):
        assert word in said


def test_a_flag_without_its_value_is_a_problem_and_no_exit() -> None:
    assert "--workers" in problems("--workers")


def test_two_ports_may_not_be_one_but_both_may_be_off() -> None:
    assert "--liveness_port=9000" in problems("--metrics_port=9000", "--liveness_port=9000")
    assert options("--metrics_port=0", "--liveness_port=0").metrics_port == 0


def test_the_webhook_is_off_until_it_has_a_port_of_its_own() -> None:
    assert options().webhook_port == 0
    found = options("--webhook_port=9443", "--webhook_url=https://127.0.0.1:9443")
    assert (found.webhook_port, found.webhook_host, found.webhook_url) == (9443, "127.0.0.1", "https://127.0.0.1:9443")
    assert "--webhook_port=8080" in problems("--webhook_port=8080")


def test_a_url_that_no_api_server_can_ask_at_is_a_problem() -> None:
    for url in ("http://127.0.0.1:9443", "https://", "https://h:1/validate", "h:1"):
        assert f"--webhook_url={url}" in problems("--webhook_port=9443", f"--webhook_url={url}")
    assert "no effect without --webhook_port" in problems("--webhook_url=https://127.0.0.1:9443")
