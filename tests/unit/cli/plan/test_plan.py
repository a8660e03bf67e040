"""``hcache plan`` as a user types it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from sglang_hcache.cli import main as command
from sglang_hcache.plan.costs import Hardware
from sglang_hcache.plan.curves import CostCurve
from sglang_hcache.plan.profile import Profile, TierCurves, analytic_profile
from sglang_hcache.plan.shapes import NAMED_SHAPES

RATES = ("--io-gbps", "25", "--tflops", "197")


@pytest.fixture
def plan(monkeypatch, capsys):
    """Runs ``hcache plan``; returns (exit status, standard output, standard error)."""

    def run(*arguments: object) -> tuple[object, str, str]:
        monkeypatch.setattr("sys.argv", ["hcache", "plan", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_info:
            command.main()
        return exit_info.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def plan_json(plan):
    def run(*arguments: object):
        status, out, err = plan(*arguments, "--json")
        assert (status, err) == (0, "")
        return json.loads(out)

    return run


def config(**change: object) -> str:
    shape = {
        "model_type": "qwen3",
        "num_hidden_layers": 8,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 1024,
        "dtype": "float32",
    }
    return json.dumps(shape | change)


def test_json(plan_json):
    """Rates of [HCache Table 3]'s 7B: its schedule and its storage come out."""
    data = plan_json("llama2-7b", *RATES)
    assert data["layers"] == {"hidden": 31, "kv": 1, "recompute": 0}
    assert data["layer_ranges"] == [
        {"first": 0, "last": 0, "method": "kv"},
        {"first": 1, "last": 31, "method": "hidden"},
    ]
    assert data["bytes_per_token"] == 31 * 8192 + 16384
    assert data["kv_over_plan_bytes"] == pytest.approx(1.94, abs=0.005)
    assert data["stored"] == {"layers": data["layers"], "bytes_per_token": data["bytes_per_token"]}
    assert data["predicted_ms"].keys() == {"hcache", "kv", "hidden", "recompute", "hybrid"}
    assert data["predicted_ms"]["hcache"] == min(data["predicted_ms"].values())
    assert data["speed_up"]["recompute"] == pytest.approx(6.3, abs=0.1)
    total_ms = data["predicted_ms"]["hcache"]
    for resource in ("compute", "io"):
        assert data["busy_ms"][resource] + data["idle_ms"][resource] == pytest.approx(total_ms)
    assert data["fill_ms"] == pytest.approx(min(data["idle_ms"].values()))
    assert data["tokens"] == 4096


def test_text(plan):
    status, out, err = plan("opt-30b", "--io-gbps", 16.5, "--tflops", 530, "--tokens", 2048)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "opt-30b: 48 layers, hidden size 7168, 56 heads, 2 bytes a value"
    assert "2,048 tokens; 16.5 GB/s of I/O, 530 TFLOP/s; costs are counted, not measured" in lines[1]
    rows = {line.split()[0]: line.split() for line in lines[4:9]}
    assert rows["hcache"][1:5] == ["40", "0", "8", "573,440"]
    assert rows["hcache"][6:] == ["1.00", "<-", "the", "plan"]
    assert rows["recompute"][1:5] == ["0", "0", "48", "0"]
    for text in (
        "Layers    0-7 recomputed, 8-47 hidden states",
        "Storage   573,440 bytes a token, 2.40 times less than K and V",
        "688,128 if recomputed layers are stored, too",
        "with auto it stores 48 hidden states, its best mix for 4,096 tokens from disk,",
        "and recomputes 8 layers in this restore: 74.0 ms with 2 ms of overhead; recomputing all 231.4 ms",
        "Pays      from 64 tokens on: a server with auto",
    ):
        assert text in out
    assert all(len(line) <= 120 for line in lines)


@pytest.mark.parametrize(
    ("method", "layers"),
    [("hidden", (32, 0, 0)), ("kv", (0, 32, 0)), ("recompute", (0, 0, 32)), ("hybrid", (0, 25, 7))],
)
def test_method_chooses_the_plan_that_is_shown(plan, plan_json, method, layers):
    data = plan_json("llama2-7b", *RATES, "--method", method)
    assert tuple(data["layers"].values()) == layers
    assert data["speed_up"][method] == 1
    assert data["speed_up"]["hcache"] <= 1
    assert data["server"]["pays_from_tokens"] == 64  # with auto
    assert f"\n{method} " in plan("llama2-7b", *RATES, "--method", method)[1]


def test_what_a_server_does(plan_json):
    """The stored mix is the same for every length and --method, what is recomputed is not."""
    short, long = (
        plan_json("opt-30b", "--io-gbps", 16.5, "--tflops", 530, "--tokens", tokens, "--method", "kv")[
            "server"
        ]
        for tokens in (2048, 131072)
    )
    for server in (short, long):
        assert server["stored"] == {"hidden": 48, "kv": 0}
        assert (server["planned_tokens"], server["planned_tier"]) == (4096, "disk")
        assert server["restores"]
        assert server["restore_ms"] < server["recompute_ms"]
    assert short["recomputed_layers"] > long["recomputed_layers"] > 0


def test_what_a_server_does_where_restoring_is_slower(plan, plan_json):
    slow = ("llama2-7b", "--io-gbps", 0.05, "--tflops", 1000, "--tokens", 64)
    assert not plan_json(*slow)["server"]["restores"]
    assert "and recomputes this history in 0.829 ms: restoring would take" in plan(*slow)[1]


@pytest.mark.parametrize("tflops", [197, 1000, 5000])
def test_pays_from_the_first_length_that_a_server_restores(plan, plan_json, tflops):
    """One answer: with a fixed cost of 2 ms, short histories are recomputed on a fast device."""

    def asked(tokens: int) -> tuple[object, ...]:
        return ("llama2-7b", "--io-gbps", 25, "--tflops", tflops, "--tokens", tokens)

    first = plan_json(*asked(4096))["server"]["pays_from_tokens"]
    assert (first == 64) is (tflops == 197)
    for tokens in (first, first + 64, 2 * first, 5 * first):
        assert plan_json(*asked(tokens))["server"]["restores"], tokens
    for tokens in {64, first // 128 * 64, first - 64} - {0, first}:
        assert not plan_json(*asked(tokens))["server"]["restores"], tokens
    assert f"Pays      from {first:,} tokens on: a server with auto" in plan(*asked(4096))[1]


def test_gqa_stores_k_and_v(plan_json, plan):
    data = plan_json("llama3-8b", "--io-gbps", 7, "--tflops", 300)
    assert data["layers"]["hidden"] == 0
    assert data["server"]["stored"] == {"hidden": 0, "kv": 32}
    assert "8 KV heads" in plan("llama3-8b", *RATES)[1]
    hidden = plan("llama3-8b", *RATES, "--method", "hidden")[1]
    assert "262,144 bytes a token, 2.00 times as much as K and V of all layers" in hidden


def test_restoring_that_does_not_pay(plan, plan_json):
    slow = ("llama3-8b", "--io-gbps", 1e-5, "--tflops", 1e5, "--method", "hidden")
    assert plan_json(*slow)["server"]["pays_from_tokens"] is None
    text = "Pays      never: a server with auto recomputes all histories of up to 1,048,576 tokens"
    assert text in plan(*slow)[1]


def test_model_folder_and_file(plan_json, tmp_path):
    (tmp_path / "config.json").write_text(config())
    folder = plan_json(tmp_path, *RATES)
    assert (folder["model"], folder["kv_bytes_per_token"]) == (tmp_path.name, 8 * 2 * 512 * 2)
    file = plan_json(tmp_path / "config.json", *RATES)
    assert file | {"model": tmp_path.name} == folder
    assert plan_json(tmp_path, *RATES, "--dtype", "float32")["kv_bytes_per_token"] == 8 * 2 * 512 * 4


def test_quantised_weights_have_no_hidden_states(plan, plan_json, tmp_path):
    """As many KV heads as heads: hidden states would be half as large as K and V, and the best plan has them."""
    (tmp_path / "config.json").write_text(config())
    assert plan_json(tmp_path, *RATES)["layers"]["hidden"]
    (tmp_path / "config.json").write_text(config(quantization_config={"quant_method": "fp8"}))
    data = plan_json(tmp_path, *RATES)
    assert data["why_not_hidden"] == "weights are quantised"
    assert data["predicted_ms"].keys() == {"hcache", "kv", "hybrid", "recompute"}
    assert data["predicted_ms"]["hcache"] == data["predicted_ms"]["hybrid"]
    assert (
        data["layers"]["hidden"]
        == data["stored"]["layers"]["hidden"]
        == data["server"]["stored"]["hidden"]
        == 0
    )
    assert "No hidden states: weights are quantised." in plan(tmp_path, *RATES)[1]


def test_an_fp8_cache_has_half_the_bytes_and_no_hidden_states(plan, plan_json, tmp_path):
    plain, fp8 = (plan_json("llama3-8b", *RATES, *flag) for flag in ((), ("--kv-cache-dtype", "fp8_e4m3")))
    assert 2 * fp8["kv_bytes_per_token"] == plain["kv_bytes_per_token"]
    assert fp8["why_not_hidden"] == "K and V are fp8_e4m3"
    assert plan_json("llama2-7b", *RATES, "--kv-cache-dtype", "fp8_e5m2")["stored"]["layers"]["hidden"] == 0
    assert "2 bytes a value, 1 of K and V" in plan("llama3-8b", *RATES, "--kv-cache-dtype", "fp8_e4m3")[1]
    plain_profile = write_profile(tmp_path / "profile.json", "llama3-8b")
    status, _, err = plan("llama3-8b", "--profile", plain_profile, "--kv-cache-dtype", "fp8_e4m3")
    assert (status, "which has other sizes than" in err) == (2, True)


LOAD = ("--method", "hidden", "--tokens-per-s", 2000, "--keep", "10m", "--drive-size", "4TB")


def test_sizes_and_wear_of_a_load(plan, plan_json):
    sizes = plan_json("llama2-7b", *RATES, *LOAD)["sizes"]
    row = 32 * 4096 * 2
    assert sizes["host_size_at_least"] == 12 * 8192 * row
    assert sizes["kept_tokens"] == 1_200_000
    assert sizes["disk_size"] == 1_200_000 * row
    assert sizes["host_size_without_disk"] == sizes["disk_size"] + 3 * 8192 * row
    assert sizes["written_a_day"] == 2000 * row * 86_400
    assert sizes["drive_writes_a_day"] == pytest.approx(11.3, abs=0.05)
    out = plan("llama2-7b", *RATES, *LOAD)[1]
    for text in (
        "Memory    25.8 GB at least on a GPU, for prefill passes of 8,192 tokens",
        "Disk      314.6 GB to keep 2,000 tokens/s for 10m: 1,200,000 tokens",
        "Wear      524.3 MB/s, 45.3 TB a day if all of it is evicted to disk",
        "11.3 drive writes a day on 4.0 TB; --hcache-disk-write-budget bounds it",
    ):
        assert text in out


def test_sizes_are_of_what_the_server_stores(plan, plan_json):
    """With auto its best mix for 4,096 tokens, whatever length the plan is for."""
    sizes = plan_json("llama3-8b", *RATES, "--tokens", 64, "--pass-tokens", 2048)["sizes"]
    assert sizes == {
        "bytes_per_token": 131_072,
        "pass_tokens": 2048,
        "host_size_at_least": 12 * 2048 * 131_072,
    }
    assert plan_json("llama3-8b", *RATES, "--method", "recompute")["sizes"] is None
    alone = plan_json("llama3-8b", *RATES, "--tokens-per-s", 1)["sizes"]
    assert (alone["keep_s"], alone["drive_writes_a_day"]) == (600, None)
    assert alone["host_size_without_disk"] == alone["host_size_at_least"]
    assert "drive writes" not in plan("llama3-8b", *RATES, "--tokens-per-s", 1)[1]


def test_host_memory_for_a_pool(plan, plan_json):
    """A server whose host tier holds no more than its KV pool says at start that it restores hardly anything."""
    (sizes,) = plan_json("llama3-8b", "--method", "kv", "--pool-tokens", 800_000)["sizes"].values()
    staging, pools = 3 * 8192 * 131_072, 2 * 800_000 * 131_072
    assert (sizes["pool_tokens"], sizes["host_size_for_pool"]) == (800_000, (staging + pools) * 8 // 7)
    text = "243.4 GB for 2 times the KV pool's 800,000 tokens"
    assert text in plan("llama3-8b", "--method", "kv", "--pool-tokens", 800_000)[1]
    small = plan_json("llama3-8b", *RATES, "--pool-tokens", 1)["sizes"]
    assert small["host_size_for_pool"] == small["host_size_at_least"]
    assert "--pool-tokens: 0 is not allowed" in plan("llama3-8b", "--pool-tokens", 0)[2]


def test_names_may_be_written_in_other_ways(plan, plan_json, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for written, name in (
        ("Llama-2-7B", "llama2-7b"),
        ("Mistral_7B_v0.3", "mistral-7b-v0.3"),
        ("OPT-6.7b", "opt-6.7b"),
    ):
        assert plan_json(written)["model"] == name
    for other in ("llama-27b", "opt-67b", "./Llama-2-7B", "llama2-7b-hf"):
        assert f"MODEL: {other!r} is no folder and no file, and not one of" in plan(other)[2]
    (tmp_path / "Llama-2-7B").write_text(config())
    assert plan_json("Llama-2-7B")["model"] == "Llama-2-7B"


def test_sizes_need_no_rates(plan, plan_json):
    row = 32 * 4096 * 2
    both = plan_json("llama2-7b")
    assert {method: sizes["bytes_per_token"] for method, sizes in both["sizes"].items()} == {
        "hidden": row,
        "kv": 2 * row,
    }
    assert both["sizes"]["kv"]["host_size_at_least"] == 12 * 8192 * 2 * row
    assert plan_json("llama2-7b", *LOAD)["sizes"] == {
        "hidden": plan_json("llama2-7b", *RATES, *LOAD)["sizes"]
    }
    assert plan_json("llama3-8b", "--kv-cache-dtype", "fp8_e4m3")["sizes"].keys() == {"kv"}
    out = plan("llama2-7b", "--method", "kv", "--pass-tokens", 2048)[1]
    assert "Stored    K and V: 524,288 bytes a token\nMemory    12.9 GB at least" in out
    assert "hidden states:" not in out
    status, out, err = plan("llama2-7b", "--tier", "disk")
    assert (status, out, "--tier needs --io-gbps and --tflops" in err) == (2, "", True)


def write_profile(path, name="llama2-7b", with_host=False, token_range=None):
    made = analytic_profile(NAMED_SHAPES[name], Hardware(flops=197e12, io_bytes_per_s=25e9))
    tiers = dict(made.tiers)
    if with_host:
        tiers["host"] = TierCurves(hidden=CostCurve(per_token_s=1e-9), kv=CostCurve(per_token_s=2e-9))
    made = Profile(
        source=made.source,
        model=made.model,
        machine="this machine",
        tiers=tiers,
        compute=made.compute,
        token_range=token_range,
    )
    path.write_text(made.to_json())
    return path


def test_profile_in_place_of_rates(plan, plan_json, tmp_path):
    file = write_profile(tmp_path / "profile.json", token_range=(64, 1024))
    rates, measured = plan_json("llama2-7b", *RATES), plan_json("--profile", file)
    assert measured["machine"] == "this machine"
    assert measured["layers"] == rates["layers"]
    assert measured["predicted_ms"] == pytest.approx(rates["predicted_ms"])
    assert plan_json("llama2-7b", "--profile", file) == measured
    assert "measured from 64 to 1,024 tokens: beyond that it guesses" in plan("--profile", file)[1]


def test_the_server_plans_for_the_slowest_tier(plan_json, tmp_path):
    file = write_profile(tmp_path / "profile.json", with_host=True)
    disk, host = (plan_json("--profile", file, "--tier", tier)["server"] for tier in ("disk", "host"))
    assert disk["planned_tier"] == host["planned_tier"] == "disk"
    assert disk["stored"] == host["stored"]
    assert host["restore_ms"] < disk["restore_ms"]


def test_tier_of_a_profile(plan_json, tmp_path):
    file = write_profile(tmp_path / "profile.json", with_host=True)
    disk, host = plan_json("--profile", file), plan_json("--profile", file, "--tier", "host")
    assert (disk["tier"], host["tier"]) == ("disk", "host")
    assert host["predicted_ms"]["kv"] < disk["predicted_ms"]["kv"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "MODEL is missing; name a model folder, a config.json or one of llama2-7b"),
        (
            [],
            "`hcache plan llama2-7b` prints what a token takes; with --io-gbps and --tflops, or --profile FILE",
        ),
        (
            ["llama2-7b", "--io-gbps", "1"],
            "--tflops is missing; give both rates, as in `hcache plan llama2-7b",
        ),
        (
            ["llama2-7b", "--method", "hybrid"],
            "--method hybrid needs --io-gbps and --tflops, or --profile FILE",
        ),
        (["llama2-7b", "--tokens", "9"], "--tokens needs --io-gbps and --tflops, or --profile FILE"),
        (RATES, "MODEL is missing; name a model folder, a config.json or one of llama2-7b"),
        (["no-such", *RATES], "MODEL: 'no-such' is no folder and no file, and not one of llama2-7b"),
        (["{dir}", *RATES], "MODEL: cannot read {dir}/config.json: No such file"),
        (["{dir}/text", *RATES], "MODEL: {dir}/text: Expecting value"),
        (["{dir}/" + "x" * 300, *RATES], "MODEL: cannot read {dir}/" + "x" * 300 + ": File name too long"),
        (["{dir}/deep", *RATES], "MODEL: {dir}/deep: it is nested too deeply"),
        (["{dir}/list", *RATES], "MODEL: {dir}/list: it must hold a JSON object"),
        (
            ["{dir}/other.json", *RATES],
            "MODEL: {dir}/other.json: model_type 'mamba' is not known; known: gemma",
        ),
        (
            ["{dir}/plain.json", *RATES],
            "MODEL: {dir}/plain.json: dtype 'int8' is not allowed; allowed: float32",
        ),
        (
            ["{dir}/deep.json", *RATES],
            "MODEL: {dir}/deep.json: num_hidden_layers must be a positive whole number up to 1,024, got 100000",
        ),
        (
            ["llama2-70b", "--io-gbps", "1", "--tflops", "1e-9"],
            "--io-gbps, --tflops: too slow for this model: per_token_s must be a number of seconds from 0 to",
        ),
        (
            ["--profile", "{dir}/slow.json"],
            "--profile: {dir}/slow.json is no profile that we can read: tiers.disk.kv: per_token_s must be a number",
        ),
        (["llama2-7b", *RATES, "--tokens", "0"], "--tokens: 0 is not allowed; give a number between 1 and"),
        (["llama2-7b", *RATES, "--tokens", "1" + 400 * "0"], "--tokens: 1000"),
        (["llama2-7b", "--io-gbps", "nan", "--tflops", "1"], "--io-gbps: nan is not allowed"),
        (["llama2-7b", "--io-gbps", "1", "--tflops", "-1"], "--tflops: -1.0 is not allowed"),
        (
            ["llama2-7b", "--io-gbps", "1e-300", "--tflops", "1"],
            "--io-gbps: 1e-300 is not allowed; give a number between 1e-09 and 1e+09",
        ),
        (["llama2-7b", "--io-gbps", "1", "--tflops", "1e308"], "--tflops: 1e+308 is not allowed"),
        (["llama2-7b", *RATES, "--dtype", "int8"], "--dtype: 'int8' is not allowed; allowed: float32"),
        (
            ["llama2-7b", *RATES, "--kv-cache-dtype", "fp4"],
            "--kv-cache-dtype: 'fp4' is not allowed; allowed: auto,",
        ),
        (
            ["llama2-7b", *RATES, "--kv-cache-dtype", "fp8_e4m3", "--method", "hidden"],
            "--method: hidden is not allowed here: K and V are fp8_e4m3; use auto or kv",
        ),
        (
            ["--profile", "{dir}/profile.json", "--kv-cache-dtype", "fp8_e4m3"],
            "--kv-cache-dtype: fp8_e4m3 needs a",
        ),
        (["llama2-7b", *RATES, "--keep", "10"], "--keep: '10' is not a time; write a number with a unit"),
        (["llama2-7b", *RATES, "--drive-size", "4 T"], "--drive-size: '4 T' is not a size; write a number"),
        (
            ["llama2-7b", *RATES, "--drive-size", "4"],
            "--drive-size: '4' is 4 bytes; write its unit, such as 4GB",
        ),
        (["llama2-7b", *RATES, "--drive-size", "0"], "--drive-size: 0 is not allowed; leave it out, or"),
        (["llama2-7b", "--drive-size", "4TB"], "--drive-size: it counts only with --tokens-per-s"),
        (["llama2-7b", *RATES, "--keep", "10m"], "--keep: it counts only with --tokens-per-s"),
        (["llama2-7b", *RATES, "--tokens-per-s", "0"], "--tokens-per-s: 0.0 is not allowed; give a number"),
        (["llama2-7b", *RATES, "--pass-tokens", "0"], "--pass-tokens: 0 is not allowed; give a number"),
        (["llama2-7b", *RATES, "--tier", "host"], "--tier: 'host' is not in the profile; it has disk"),
        (
            ["llama2-7b", *RATES, "--method", "fast"],
            "--method: 'fast' is not allowed; allowed: auto, hidden, kv, hybrid, recompute",
        ),
        (["--profile", "{dir}/none"], "--profile: cannot read {dir}/none: No such file"),
        (
            ["--profile", "{dir}/text"],
            "--profile: {dir}/text is no profile that we can read: Expecting value",
        ),
        (
            ["--profile", "{dir}/profile.json", *RATES],
            "--profile: it takes the place of --io-gbps and --tflops",
        ),
        (["--profile", "{dir}/profile.json", "--dtype", "float32"], "--dtype: float32 needs a MODEL"),
        (
            ["llama3-8b", "--profile", "{dir}/profile.json"],
            "--profile: {dir}/profile.json is of the model llama2-7b, which has other sizes than llama3-8b",
        ),
        (["llama2-7b", *RATES, "--png", "{dir}/none/a.png"], "--png: cannot write {dir}/none/a.png: No such"),
    ],
)
def test_errors_are_one_line(plan, tmp_path, arguments, message):
    (tmp_path / "text").write_text("hello")
    (tmp_path / "list").write_text("[]")
    (tmp_path / "deep").write_text("[" * 100_000)
    (tmp_path / "other.json").write_text(config(model_type="mamba"))
    (tmp_path / "plain.json").write_text(config(dtype="int8"))
    (tmp_path / "deep.json").write_text(config(num_hidden_layers=100_000))
    write_profile(tmp_path / "profile.json")
    slow = json.loads((tmp_path / "profile.json").read_text())
    slow["tiers"]["disk"]["kv"]["per_token_s"] = 1e308
    (tmp_path / "slow.json").write_text(json.dumps(slow))
    status, out, err = plan(*(text.replace("{dir}", str(tmp_path)) for text in arguments))
    assert (status, out) == (2, "")
    assert err.startswith("hcache: error: ")
    assert message.replace("{dir}", str(tmp_path)) in err
    assert err.count("\n") == 1


def test_picture(plan, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.png"
    status, out, err = plan("llama2-7b", *RATES, "--png", file)
    assert (status, err) == (0, "")
    assert out.endswith(f"wrote {file}\n")
    picture = file.read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000


def test_picture_without_matplotlib(plan, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "sglang_hcache.cli.plan.picture", raising=False)
    status, out, err = plan("llama2-7b", *RATES, "--png", tmp_path / "plan.png")
    assert (status, out) == (2, "")
    expected = "drawing needs matplotlib (the extra `plots`); install it with: pip install matplotlib"
    assert err == f"hcache: error: --png: {expected}\n"


@pytest.mark.parametrize("name", ["planner.md", "tuning.md"])
def test_the_page_shows_what_is_printed(plan, name):
    """From the beginning, or from the line that follows an ellipsis."""
    page = (Path(__file__).parents[4] / "docs" / name).read_text(encoding="utf-8")
    command_line, _, shown = page.partition("$ hcache plan ")[2].partition("```")[0].partition("\n")
    _, out, _ = plan(*command_line.split())
    lines = shown.removeprefix("…\n").splitlines()
    assert [line.rstrip() for line in out.splitlines()][-len(lines) :] == lines
    assert shown.startswith("…") or len(out.splitlines()) == len(lines)


def test_help_teaches(plan):
    status, out, _ = plan("--help")
    assert status == 0
    text = " ".join(out.split())
    for word in ("MODEL", "--io-gbps", "--tflops", "--profile", "--tokens", "--method", "--png"):
        assert word in text
    assert "hcache profile --model-path MODEL" in text
    assert "best for 4,096 tokens" in text
