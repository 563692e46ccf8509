"""Parts of the article that are tables and lists of sentences: what they say is computed from frames."""

import hashlib
from pathlib import Path

import pandas as pd
from markupsafe import Markup

from kvlab import paths, records
from kvlab.analyse.findings import Answer, proven, refusals, unstable
from kvlab.analyse.summary import Estimate, interval, measured
from kvlab.article import prose

ANSWER_FIGURES = {
    "q1": "tpot_by_context", "q2": "speedups_by_context", "q3": "waterfall", "q4": "tier_gaps",
    "q5": "kv_bytes_by_context",
}  # fmt: skip


def answers(found: list[Answer], environment: dict, language: str, source: str) -> None:
    """The table that opens the article: question, verdict, effect with its interval, machine."""
    rows = [
        {
            "question": a.question,
            "claim": f"{a.question}_claim",
            "verdict": a.verdict,
            "effect": prose.both(f"answer.{a.question}_effect", effect=a.effect, **a.numbers),
            "machine": machine_words(environment),
            "chart": link_to_figure(ANSWER_FIGURES[a.question]),
        }
        for a in found
    ]
    prose.table(rows, "answers", language, source=source)


def link_to_figure(name: str) -> dict[str, Markup]:
    link = Markup('<a href="#fig-{}">{}</a>')
    return {each: link.format(name, prose.plain(f"charts.{name}.title", each)) for each in prose.LANGUAGES}


def verdicts(found: list[Answer], break_even: tuple[int | None, bool] | None, language: str, source: str) -> None:
    """Each answer as a sentence; with `break_even` and a verdict at all, also from which length on the cache pays."""
    for a in found:
        prose.say(f"verdict.{a.question}.{a.verdict}", language, source=source, **a.numbers)
    if break_even is None or any(a.verdict in ("no_verdict", "undecided") for a in found):
        return
    length, is_shortest = break_even
    if length is None:
        prose.say("verdict.q2.pays_nowhere", language)
    else:
        key = "sections.pays_at_shortest" if is_shortest else "verdict.q2.pays_from"
        prose.say(key, language, source=source, context_length=length)


def limits(environment: dict, parameters: dict, language: str) -> None:
    """What this page does not show, as far as its own records tell."""
    prose.say("limits.one_machine", language, machine=machine_words(environment), dtype=parameters["dtype"])
    if environment["card_model"] is None:
        prose.say("limits.no_gpu", language, model=parameters["model"])
    if not records.environments(paths.results("a10")):
        prose.say("limits.no_a10", language)


def machine_name(environment: dict) -> str:
    """The machine as records and predictions name it."""
    return environment["card_model"] or f"{environment['cpu_model']}, {environment['cpu_quota']:g} CPUs"


def machine_words(environment: dict) -> dict[str, str]:
    """The machine as the page names it, in every language."""
    if environment["card_model"]:
        return dict.fromkeys(prose.LANGUAGES, environment["card_model"])
    return prose.both("machine.with_cpus", cpu=environment["cpu_model"], count=f"{environment['cpu_quota']:g}")


def machine(environment: dict, parameters: dict, language: str, source: str) -> None:
    """The machine and software of the records, as a table."""
    boots = boots_of(environment, parameters["profile"])
    facts = {
        "card": environment["card_model"],
        "cpu": environment["cpu_model"],
        "cpus": f"{environment['cpu_quota']:g}",
        "flags": ", ".join(environment["cpu_flags"]),
        "memory": prose.friendly(environment["memory_limit_bytes"] or environment["memory_bytes"], "B"),
        "system": environment["system"],
        "software": ", ".join(f"{name} {version}" for name, version in environment["packages"].items()),
        "model": " ".join(str(parameters[name]) for name in ("model", "model_revision") if parameters.get(name)),
        "dtype": parameters.get("dtype"),
        "threads": " / ".join(str(parameters[name]) for name in ("threads", "server_threads") if name in parameters),
        "kvlab": kvlab_versions(boots),
        "environment": environment["environment"],
        "recorded": ", ".join(dict.fromkeys(each["recorded_at"][:10] for each in boots)),
    }
    rows = [{"what": name, "value": value or prose.both("machine.none")} for name, value in facts.items()]
    prose.table(rows, "machine", language, source=source)


def provenance(profile: str, language: str) -> dict[str, str]:
    """What stands at the foot of the page: the last environment that recorded, its code and how much it recorded."""
    folder = paths.results(profile)
    known = records.environments(folder)
    if not known:
        return {}
    files = [path for path in sorted(folder.glob("*.jsonl")) if path.name != "environments.jsonl"]
    facts = {
        "machine": machine_words(known[-1])[language],
        "environment": known[-1]["environment"],
        "kvlab": kvlab_versions(boots_of(known[-1], profile)),
        "records": ", ".join(stored(path, known[-1]["environment"]) for path in files),
    }
    of_models = [r["model_files"] for path in files for r in records.load(path) if r.get("model_files")]
    if of_models:
        facts["model_files"] = ", ".join(f"{name} sha256 {digest}…" for name, digest in of_models[-1].items())
    return {prose.plain(f"provenance.{name}", language): value for name, value in facts.items()}


def stored(path: Path, environment: str) -> str:
    """A record file, how many records of the environment it holds, and the start of its SHA-256."""
    count = sum(r["environment"] == environment for r in records.load(path))
    return f"{paths.public(path)}: {count} (SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()[:12]})"


def boots_of(environment: dict, profile: str) -> list[dict]:
    """The environment as each boot of its machine wrote it that recorded something, oldest first."""
    known = records.environments(paths.results(profile))
    return [each for each in known if each["environment"] == environment["environment"]]


def kvlab_versions(boots: list[dict]) -> str:
    """Every commit that recorded, in order."""
    codes = [each["kvlab"] for each in boots]
    commits = [f", {code['commit']}{' +' if code['dirty'] else ''}" if code["commit"] else "" for code in codes]
    return "; ".join(dict.fromkeys(f"{code['version']}{commit}" for code, commit in zip(codes, commits)))


def control(pairs: pd.DataFrame, language: str, source: str) -> None:
    """The control length by length: paired ratio of TTFT with its interval, and on how many steps TPOT rests."""
    groups = proven(pairs).groupby(["attention", "context_length", "output_tokens"])
    table = [
        {"attention": attention, "context_length": length, "ratio": interval(group["ttft_ratio"]), "steps": tokens - 1}
        for (attention, length, tokens), group in groups
    ]
    prose.table(table, "control", language, source=source)


def serving_checks(points: pd.DataFrame, language: str, source: str) -> None:
    """The checks of every S1 point, one row each."""
    rows = points.sort_values(["context_length", "concurrency"]).to_dict("records")
    for row in rows:
        bad = row["void"] is not None or row["tokens_conserved"] is False or row["failed"] or row["client_saturated"]
        row["counts"] = not bad
    prose.table(rows, "serving_checks", language, source=source)


def missing(records: list[dict], language: str, words: str = "status.missing_section") -> None:
    """Why a section has no results, where its server could not be started and nothing was measured since."""
    failed = [r for r in records if r["kind"] == "server" and r["status"] != "ok"]
    if failed and records[-1] is failed[-1]:
        prose.say(words, language, reason=failed[-1]["reason"])


def negative_control(refused: list[str | None], language: str, source: str) -> None:
    """The pair that was spoilt on purpose: refused with its reason, or a loud word that the proof failed."""
    for why in dict.fromkeys(refused):  # one sentence, however often the first repetition was begun
        key = "sections.negative_control_refused" if why else "sections.negative_control_passed"
        prose.say(key, language, source=source, reason=prose.both(f"refusal.{why}") if why else "")


def trouble(generations: pd.DataFrame, pairs: pd.DataFrame, drift: Estimate, language: str, source: str) -> None:
    """What a sceptic asks for: how many pairs were proven, which were refused, which points failed or were unsteady."""
    pairs = measured(pairs)
    counts = {"proven": int(pairs["refusal"].isna().sum()), "pairs": len(pairs)}
    prose.say("sections.proven", language, source=source, **counts)
    for why, count in refusals(pairs):
        prose.say("sections.refused", language, source=source, count=count, reason=prose.both(f"refusal.{why}"))
    distinct = ["status", "context_length", "attention", "use_cache"]
    for row in generations[generations["status"] != "ok"].drop_duplicates(distinct).to_dict("records"):
        key = f"status.{row['status']}" if row["status"] in ("out_of_memory", "timeout") else "status.failed"
        what = {"context_length": row["context_length"], "reason": row["reason"] or row["status"]}
        prose.say(key, language, source=source, **what)
    unsteady = [
        {"what": {each: unsteady_name(point, each) for each in prose.LANGUAGES}, "tpot": estimate}
        | {"context_length": point["context_length"]}
        for point, estimate in unstable(generations)
    ]
    if unsteady:
        prose.say("sections.unsteady", language, source=source, count=len(unsteady))
        prose.table(unsteady, "unsteady", language, source=source)
    if drift.n:
        prose.say("sections.drift", language, source=source, drift=drift)


def unsteady_name(point: dict, language: str) -> str:
    arm = "cache" if point["use_cache"] else "no_cache"
    names = [prose.plain(f"label.{name}", language) for name in (arm, point["attention"])]
    return ", ".join(names) if language == "en" else "，".join(names)
