"""Command lines become settings, settings become command lines, and everything wrong is told at once."""

from __future__ import annotations

import dataclasses
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_worker.contract import Flag, WorkerSettings, flags_of
from kvtier_worker.contract.effects import NEEDS
from kvtier_worker.contract.elsewhere import FLAGS_OF_OTHER_PARTS
from kvtier_worker.errors import ConfigError

FLAGS = flags_of(WorkerSettings)

# The command line of the original page, section "Fused xLLM".
ORIGINAL_PAGE = [
    "--model=/path/to/model",
    "--model_id=my-model-revision-v1",
    "--enable_prefix_cache=true",
    "--host_blocks_factor=4",
    "--enable_kvcache_store=true",
    "--store_protocol=tcp",
    "--store_master_server_address=127.0.0.1:50051",
    "--store_metadata_server=P2PHANDSHAKE",
    "--store_local_hostname=127.0.0.1:12345",
    "--prefetch_batch_size=8",
    "--prefetch_timeout=30000",
]


def values(flag: Flag) -> st.SearchStrategy[Any]:
    if flag.kind is bool:
        return st.booleans()
    if flag.kind is int:
        return st.integers(-(10**30), 10**30)
    if flag.kind is float:
        return st.floats(allow_nan=False)
    return st.sampled_from(flag.choices) if flag.choices else st.text()


@st.composite
def any_settings(draw: st.DrawFn) -> WorkerSettings:
    names = draw(st.sets(st.sampled_from(sorted(FLAGS))))
    return WorkerSettings(**{name: draw(values(FLAGS[name])) for name in sorted(names)})


def parse_errors(*argv: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        WorkerSettings.from_argv(argv)
    return caught.value.violations


def sound(**changes: Any) -> WorkerSettings:
    return dataclasses.replace(WorkerSettings(model="/models/m"), **changes)


STORE_ON = {"enable_kvcache_store": True, "host_blocks_factor": 4.0, "store_master_server_address": "127.0.0.1:50051"}


@given(any_settings())
def test_what_is_rendered_parses_to_the_same_settings(settings: WorkerSettings) -> None:
    assert WorkerSettings.from_argv(settings.to_argv(), settings.to_env()) == settings


@given(any_settings())
def test_flag_and_value_may_stand_apart(settings: WorkerSettings) -> None:
    apart = [word for text in settings.to_argv() for word in text.split("=", 1)]
    if any(word.startswith("--") for word in apart[1::2]):
        return  # such a value needs the equals sign
    assert WorkerSettings.from_argv(apart, settings.to_env()) == settings


def test_the_command_line_of_the_original_page_parses_and_has_no_violation() -> None:
    settings = WorkerSettings.from_argv(ORIGINAL_PAGE)
    assert settings.violations() == ()
    assert settings.warnings() == ()
    assert settings.host_blocks_factor == 4.0
    assert settings.enable_kvcache_store
    assert settings.prefetch_timeout == 30000
    assert str(settings.store_endpoint(3)) == "127.0.0.1:12348"


def test_a_secret_is_rendered_to_the_environment_and_never_to_argv() -> None:
    settings = sound(api_key="s3cret")
    assert not any("s3cret" in text for text in settings.to_argv())
    assert settings.to_env() == {"KVTIER_API_KEY": "s3cret"}


def test_a_flag_wins_over_the_environment() -> None:
    env = {"KVTIER_API_KEY": "from-env"}
    assert WorkerSettings.from_argv(["--model=m"], env).api_key == "from-env"
    assert WorkerSettings.from_argv(["--api_key=typed"], env).api_key == "typed"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--enable_kvcache_store"], True),
        (["--enable_kvcache_store", "--port=1"], True),
        (["--enable_kvcache_store=1"], True),
        (["--enable_kvcache_store", "false"], False),
        (["--enable_kvcache_store=true", "--enable_kvcache_store=0"], False),
        (["--noenable_kvcache_store"], False),
        (["-enable-kvcache-store=yes"], True),
    ],
)
def test_switches_are_written_in_every_usual_way(argv: list[str], expected: bool) -> None:
    assert WorkerSettings.from_argv(argv).enable_kvcache_store is expected


def test_negative_numbers_may_stand_apart() -> None:
    assert WorkerSettings.from_argv(["--max_tokens_per_chunk_for_prefill", "-1"]).max_tokens_per_chunk_for_prefill == -1


def test_a_later_value_mends_an_earlier_wrong_one() -> None:
    assert WorkerSettings.from_argv(["--port=x", "--port=9"]).port == 9


def test_every_unreadable_flag_is_told_at_once() -> None:
    errors = parse_errors(
        "--modle=x",
        "--port",
        "abc",
        "--host_blocks_factor=four",
        "--enable_prefix_cache=maybe",
        "--store_protocol=udp",
        "--instance_role=PREFILL",
        "stray",
        "--model",
    )
    assert errors == (
        "--modle=x: unknown flag; did you mean --model?",
        "--port=abc: not a whole number; use e.g. --port=8010",
        "--host_blocks_factor=four: not a number; use e.g. --host_blocks_factor=0.0",
        "--enable_prefix_cache=maybe: is a switch; use --enable_prefix_cache=true or --enable_prefix_cache=false",
        "--store_protocol=udp: not one of the values known here; use tcp or rdma",
        "--instance_role=PREFILL: not supported yet by this version; use DEFAULT",
        "stray: belongs to no flag; every setting is written --flag=value",
        "--model: needs a value, e.g. --model=VALUE",
    )


@pytest.mark.parametrize("name", sorted(FLAGS_OF_OTHER_PARTS))
def test_a_flag_of_another_part_is_taken_with_its_default_only(name: str) -> None:
    other = FLAGS_OF_OTHER_PARTS[name]
    assert WorkerSettings.from_argv([f"--{name}={other.harmless[0]}"]) == WorkerSettings()
    (error,) = parse_errors(f"--{name}=17")
    assert error.startswith(f"--{name}=17: ")
    assert "not supported yet by this version" in error


def test_a_switch_of_another_part_alone_asks_for_it() -> None:
    (error,) = parse_errors("--enable_disagg_pd")
    assert error.startswith("--enable_disagg_pd=true: prefill/decode disaggregation is not supported yet")
    assert WorkerSettings.from_argv(["--noenable_disagg_pd"]) == WorkerSettings()


def test_no_flag_stands_in_both_tables() -> None:
    assert not FLAGS.keys() & FLAGS_OF_OTHER_PARTS.keys()


@given(st.text(alphabet=string.ascii_lowercase + "_", min_size=1))
def test_an_unknown_flag_is_never_ignored(name: str) -> None:
    if name not in FLAGS and name not in FLAGS_OF_OTHER_PARTS and not name.startswith("no"):
        assert parse_errors(f"--{name}=1")[0].startswith(f"--{name}=1: unknown flag")


@given(st.lists(st.text()))
def test_no_command_line_makes_the_parser_fail(argv: list[str]) -> None:
    parsed = WorkerSettings.parse(argv)
    for _, text in parsed.errors:
        assert text
    parsed.settings.violations()


@given(any_settings())
def test_violations_name_their_flag_and_never_fail(settings: WorkerSettings) -> None:
    for text in settings.violations():
        assert text.startswith("--")
        assert text.split(":")[0].split("=")[0].removeprefix("--") in FLAGS
    settings.warnings()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": ""}, "--model: missing"),
        ({"port": 0}, "--port=0: out of range; use 1..65535"),
        ({"port": 65536}, "--port=65536: out of range"),
        ({"admin_port": 8010}, "--admin_port=8010: is the API's own port"),
        ({"api_key": "two words"}, "--api_key: a header cannot carry it"),
        ({"host": ""}, "--host: empty"),
        ({"host_blocks_factor": float("inf")}, "--host_blocks_factor=inf: out of range"),
        ({"host_blocks_factor": float("nan")}, "--host_blocks_factor=nan: out of range"),
        ({"host_blocks_factor": -1.0}, "--host_blocks_factor=-1.0: out of range"),
        ({"host_blocks_factor": 2.0, "enable_prefix_cache": False}, "--enable_prefix_cache=false"),
        ({"host_blocks_factor": 2.0, "kv_cache_dtype": "bfloat16"}, "--kv_cache_dtype=bfloat16: not with a host tier"),
        (STORE_ON | {"host_blocks_factor": 1.0}, "--host_blocks_factor=1.0: --enable_kvcache_store=true needs more"),
        (STORE_ON | {"enable_prefix_cache": False}, "--enable_prefix_cache=false"),
        (STORE_ON | {"store_master_server_address": ""}, "--store_master_server_address: missing"),
        (STORE_ON | {"store_master_server_address": "a:1;b:2"}, "several endpoints need etcd://"),
        (STORE_ON | {"store_master_server_address": "etcd://http://a:1"}, "without http://"),
        (STORE_ON | {"store_master_server_address": "etcd://"}, "needs at least one"),
        (STORE_ON | {"store_master_server_address": "host"}, "the port is missing"),
        (STORE_ON | {"store_metadata_server": ""}, "--store_metadata_server: empty"),
        (STORE_ON | {"store_local_hostname": "h:65535", "tp_size": 2}, "port 65535 + rank 1 is above 65535"),
        (STORE_ON | {"store_local_hostname": "0.0.0.0:12345"}, "peers would dial themselves"),
        (STORE_ON | {"store_local_hostname": "127.0.0.1:8009", "tp_size": 2}, "--port=8010 is one of its ports"),
        (STORE_ON | {"store_shm_client": "nowhere"}, "--store_shm_client=nowhere: the port is missing"),
        ({"prefetch_batch_size": 0}, "--prefetch_batch_size=0: out of range"),
        ({"block_size": 0}, "--block_size=0"),
        ({"max_memory_utilization": 1.5}, "--max_memory_utilization=1.5: out of range; use 0.01..1"),
        ({"max_tokens_per_chunk_for_prefill": 0}, "a prompt would never advance"),
        ({"max_tokens_per_chunk_for_prefill": 20000}, "above --max_tokens_per_batch=10240"),
        ({"max_tokens_per_chunk_for_prefill": 9, "enable_chunked_prefill": False}, "needs chunks"),
        ({"max_tokens_per_batch": 100}, "--max_seqs_per_batch=200: above --max_tokens_per_batch=100"),
        ({"enable_chunked_prefill": False, "max_model_len": 20000}, "--max_tokens_per_batch=10240: below"),
        ({"enable_in_batch_prefix_cache": True, "enable_prefix_cache": False}, "--enable_in_batch_prefix_cache=true"),
        ({"master_node_addr": "nowhere"}, "--master_node_addr=nowhere: the port is missing"),
        ({"tp_size": 0}, "--tp_size=0: out of range"),
        ({"device_eviction": "random"}, "--device_eviction=random"),
    ],
)
def test_a_setting_that_cannot_work_is_named_with_its_value_and_a_fix(changes: dict[str, Any], expected: str) -> None:
    found = sound(**changes).violations()
    assert len(found) == 1, found
    assert expected in found[0]
    assert "; " in found[0]


def test_all_violations_are_told_at_once() -> None:
    found = sound(port=0, tp_size=0, prefetch_batch_size=0, enable_kvcache_store=True).violations()
    assert [text.split("=")[0].split(":")[0] for text in found] == [
        "--port",
        "--prefetch_batch_size",
        "--tp_size",
        "--host_blocks_factor",
        "--store_master_server_address",
    ]


def test_the_defaults_have_only_the_model_missing() -> None:
    assert [text.split(":")[0] for text in WorkerSettings().violations()] == ["--model"]


@pytest.mark.parametrize("address", ["10.0.0.1:50051", "[::1]:50051", "etcd://a:2379;b:2379;c:2379", "etcd://[::1]:1"])
def test_every_form_of_a_store_address_is_taken(address: str) -> None:
    assert sound(**STORE_ON | {"store_master_server_address": address}).violations() == ()


@pytest.mark.parametrize(
    ("hostname", "rank", "expected"),
    [
        ("", 1, "127.0.0.1:12346"),
        ("10.1.2.3:20000", 2, "10.1.2.3:20002"),
        ("node-a", 0, "node-a:12345"),
        ("[fe80::1]:700", 1, "[fe80::1]:701"),
        ("fe80::1", 1, "[fe80::1]:12346"),
    ],
)
def test_a_worker_owns_base_port_plus_rank(hostname: str, rank: int, expected: str) -> None:
    assert str(sound(store_local_hostname=hostname).store_endpoint(rank)) == expected


HOST = {"host_blocks_factor": 2.0}
NEEDS_STORE = "it needs --enable_kvcache_store=true"
NEEDS_HOST = "it needs --host_blocks_factor above 1"
NEEDS_PREFIX_CACHE = "it needs --enable_prefix_cache=true"
WITHOUT_EFFECT: list[tuple[dict[str, Any], str, str]] = [
    ({"host_blocks_factor": 0.5}, "--host_blocks_factor=0.5", "it needs a value above 1"),
    ({"prefetch_timeout": 5}, "--prefetch_timeout=5", NEEDS_STORE),
    (HOST | {"prefetch_batch_size": 8}, "--prefetch_batch_size=8", NEEDS_STORE),
    ({"store_protocol": "rdma"}, "--store_protocol=rdma", NEEDS_STORE),
    ({"store_rdma_devices": "mlx5_0"}, "--store_rdma_devices=mlx5_0", f"{NEEDS_STORE} and --store_protocol=rdma"),
    (STORE_ON | {"store_rdma_devices": "mlx5_0"}, "--store_rdma_devices=mlx5_0", "it needs --store_protocol=rdma"),
    ({"store_master_server_address": "a:1"}, "--store_master_server_address=a:1", NEEDS_STORE),
    ({"store_metadata_server": "etcd://a:1"}, "--store_metadata_server=etcd://a:1", NEEDS_STORE),
    ({"store_local_hostname": "10.0.0.1:9000"}, "--store_local_hostname=10.0.0.1:9000", NEEDS_STORE),
    ({"store_shm_client": "127.0.0.1:5000"}, "--store_shm_client=127.0.0.1:5000", NEEDS_STORE),
    ({"store_call_timeout": 9}, "--store_call_timeout=9", NEEDS_STORE),
    ({"store_replica_num": 2}, "--store_replica_num=2", NEEDS_STORE),
    ({"enable_store_integrity": False}, "--enable_store_integrity=false", NEEDS_STORE),
    ({"layers_wise_copy_batchs": 2}, "--layers_wise_copy_batchs=2", NEEDS_HOST),
    ({"host_eviction": "lru"}, "--host_eviction=lru", NEEDS_HOST),
    ({"enable_restore_cost_gate": True}, "--enable_restore_cost_gate=true", NEEDS_HOST),
    ({"enable_control_h2d_block_num": True}, "--enable_control_h2d_block_num=true", NEEDS_HOST),
    (
        HOST | {"max_h2d_blocks_per_step": 3},
        "--max_h2d_blocks_per_step=3",
        "it needs --enable_control_h2d_block_num=true",
    ),
    ({"enable_prefix_cache": False, "enable_cache_salt": True}, "--enable_cache_salt=true", NEEDS_PREFIX_CACHE),
    ({"enable_prefix_cache": False, "xxh3_128bits_seed": 7}, "--xxh3_128bits_seed=7", NEEDS_PREFIX_CACHE),
    ({"enable_prefix_cache": False, "device_eviction": "s3fifo"}, "--device_eviction=s3fifo", NEEDS_PREFIX_CACHE),
    ({"enable_chunked_prefill": False}, "--enable_mix_batch=true", "it needs --enable_chunked_prefill=true"),
    (
        {"max_cache_size": 1 << 30, "max_memory_utilization": 0.5},
        "--max_memory_utilization=0.5",
        "it needs --max_cache_size=0",
    ),
]


@pytest.mark.parametrize(("changes", "shown", "needs"), WITHOUT_EFFECT)
def test_a_setting_without_effect_is_named_with_its_value_and_what_it_needs(
    changes: dict[str, Any], shown: str, needs: str
) -> None:
    assert sound(**changes).violations() == ()
    assert sound(**changes).warnings() == (f"{shown} has no effect; {needs}",)


def test_every_need_of_a_flag_is_tested() -> None:
    assert {shown.split("=")[0].removeprefix("--") for _, shown, _ in WITHOUT_EFFECT} == NEEDS.keys()


def test_several_settings_without_effect_are_told_at_once() -> None:
    settings = sound(store_rdma_devices="mlx5_0", max_h2d_blocks_per_step=3, host_blocks_factor=0.5)
    assert [text.split("=")[0] for text in settings.warnings()] == [
        "--host_blocks_factor",
        "--store_rdma_devices",
        "--max_h2d_blocks_per_step",
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        STORE_ON,
        STORE_ON | {"store_protocol": "rdma", "store_rdma_devices": "mlx5_0", "prefetch_timeout": 5},
        HOST | {"layers_wise_copy_batchs": 2, "host_eviction": "lru", "enable_restore_cost_gate": True},
        HOST | {"enable_control_h2d_block_num": True, "max_h2d_blocks_per_step": 3},
        {"enable_chunked_prefill": False, "enable_mix_batch": False},
        {"enable_cache_salt": True, "xxh3_128bits_seed": 7},
        {"max_memory_utilization": 0.5},
    ],
)
def test_settings_with_an_effect_are_not_warned_about(changes: dict[str, Any]) -> None:
    assert sound(**changes).warnings() == ()


@pytest.mark.parametrize("flag", FLAGS.values(), ids=FLAGS.keys())
def test_every_flag_has_a_group_a_help_and_a_place_in_both_pages(flag: Flag) -> None:
    assert flag.group
    assert len(flag.help) > 10
    assert flag.help.endswith((".", "KVTIER_API_KEY."))
    assert f"\n  --{flag.name}=" in WorkerSettings.help_text()
    assert f"| `--{flag.name}` |" in WorkerSettings.render_markdown()
    if flag.kind in (int, float):
        assert flag.range_text, "a number without a range"


def test_the_help_fits_a_terminal() -> None:
    assert max(len(line) for line in WorkerSettings.help_text().splitlines()) <= 100
