"""What a run survives: the smoke profile is killed, filled up, torn and lied to, and the records are counted after it.

`make torture TORTURE="--seed 1 --kills 50 --minutes 20"`. Everything happens in a temporary folder; each round ends
with the same questions: is a process left, is a record lost or doubled, does a page pass for newer than it is?
At the end everything has to be measured by one run that nothing disturbs. It prints a table; exit 1 where a
question was answered wrongly. Linux; as root it also mounts a small tmpfs for the full disk and the read-only one.
"""

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kvlab import records, sweep  # noqa: E402

VICTIMS = {  # kind -> what its command line holds, in the order in which a run starts them
    "make": "make report",
    "report": "-m kvlab report",
    "kernel": "ipykernel_launcher",
    "guard": "measure/guard.py",
    "server": "vllm.entrypoints",
    "engine": "VLLM::",
    "worker": "-m kvlab.measure.",
}
ENDS, SERVING = ("make", "report"), ("guard", "server", "engine")  # a run is over with the former
SOON_S, PATIENCE_S = 5, 180  # on average until a process that came is killed; at most until one comes
RESERVE_S = 600  # kept for what comes after the kills
TOO_LATE_S = 60  # with less left nothing is begun
ONE_RUN_S = 420
STALE = 'class="warnings"'


class Torture:
    """One temporary results folder, what is done to it, and what was found; `rows` is the table."""

    def __init__(self, seed, minutes):
        self.random, self.rows = random.Random(seed), []
        self.output = Path(tempfile.mkdtemp(prefix="kvlab-torture-"))
        self.results = self.output / "results" / "smoke"
        self.ends_s = time.monotonic() + 60 * minutes
        self.set = os.environ.get("SET", "")  # as for `make report`: a lighter model, say
        os.environ["KVLAB_OUTPUT"] = str(self.output)

    def left_s(self):
        return self.ends_s - time.monotonic()

    # ---- running

    def start(self, *more, output=None):
        """`make report` of the smoke profile in a session of its own; what it says goes into a file."""
        said = open(self.output / "said.log", "w+")
        command = ["make", "report", "PROFILE=smoke", f"PYTHON={sys.executable}", *more]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        environment |= {"KVLAB_OUTPUT": str(output or self.output)}
        run = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                               start_new_session=True)  # fmt: skip
        run.said = said
        return run

    def finish(self, run):
        """(exit code, what it said) of a run; None as the code of one that had to be ended for time."""
        with suppress(subprocess.TimeoutExpired):
            run.wait(max(1, min(ONE_RUN_S, self.left_s())))
        code = run.poll()
        if code is None:
            self.end_all()
            run.wait()
        run.said.seek(0)
        return code, run.said.read()

    def living(self):
        """Processes that were started for this folder, by kind."""
        found = {}
        for process in psutil.process_iter(["cmdline"]):
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and self.is_ours(process):
                    line = " ".join(process.cmdline())
                    kind = next((kind for kind, words in VICTIMS.items() if words in line), "other")
                    found.setdefault(kind, []).append(process)
        return found

    def is_ours(self, process):
        """By its environment, or by the file it writes to: vLLM's engine puts its title where the environment was."""
        ours = process.pid != os.getpid() and str(self.output) in process.environ().get("KVLAB_OUTPUT", "")
        with suppress(OSError):
            ours = ours or os.readlink(f"/proc/{process.pid}/fd/2").startswith(str(self.output))
        return ours

    def said(self):
        return (self.output / "said.log").read_text(errors="replace")

    def end_all(self):
        for process in sum(self.living().values(), []):
            with suppress(psutil.Error):
                process.kill()

    # ---- questions

    def lines(self):
        """File name -> its whole lines."""
        found = {path.name: path.read_bytes() for path in self.results.glob("*.jsonl")}
        return {name: content.split(b"\n")[:-1] for name, content in found.items()}

    def wrong(self, before):
        """What a round left behind that it must not, as words; empty where all is well."""
        found, after = [], self.lines()
        ends_s = time.monotonic() + 20
        while self.living() and time.monotonic() < ends_s:
            time.sleep(0.5)
        if left := self.living():
            found.append(f"left running: {', '.join(sorted(left))}")
            self.end_all()
        found += [f"{name} lost lines" for name in before if after.get(name, [])[: len(before[name])] != before[name]]
        return found + [f"doubled: {name}" for name in self.doubled()]

    def doubled(self):
        """Names of what was recorded twice: a request or an arm, a point or a pair that was already complete."""
        found = []
        s1b, s1 = (self.load(name) for name in ("s1b", "s1"))
        arms = Counter((r["pair"], r["use_cache"]) for r in s1b if r.get("pair"))
        requests = Counter((r["attempt"], r["request"]) for r in s1 if r["kind"] == "request")
        done = [r for r in s1b if r.get("pair") and sweep.done(r) and not sweep.is_control(r)]
        whole = {pair for pair, n in Counter(r["pair"] for r in done).items() if n == 2}
        pairs = Counter(records.key(r) for r in done if r["pair"] in whole and r["use_cache"])
        points = Counter(records.key(r) for r in s1 if r["kind"] == "point" and sweep.done(r))
        for name, counted in (("arm", arms), ("request", requests), ("pair", pairs), ("point", points)):
            found += [name] * any(n > 1 for n in counted.values())
        return found

    def load(self, name):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return records.load(self.results / f"{name}.jsonl")

    def stale(self):
        """Whether each page there is carries a warning."""
        return [STALE in page.read_text() for page in self.results.glob("article.*.html")]

    def note(self, what, times, wrong, seconds):
        self.rows.append((what, times, "; ".join(wrong) or "nothing lost", seconds))
        print(f"{what:<34}{times:>6}  {self.rows[-1][2]:<60}{seconds:>6.0f} s", flush=True)

    # ---- what is done

    def forget(self, share):
        """Drop the records of some points, so that the next run has something to measure."""
        for name in ("s1b", "s1"):
            found = self.load(name)
            points = sorted({json.dumps(r["point"], sort_keys=True) for r in found})
            dropped = set(self.random.sample(points, round(len(points) * share)))
            kept = [r for r in found if json.dumps(r["point"], sort_keys=True) not in dropped]
            if found:
                content = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in kept)
                (self.results / f"{name}.jsonl").write_text(content)

    def plan(self, counts, most):
        """Kinds that the next run loses, in order: some of those killed least so far, and at last what ends it."""

        def rarest(kinds):
            return sorted(kinds, key=lambda kind: (counts[kind], self.random.random()))

        on_the_way = rarest(set(VICTIMS) - set(ENDS))[: self.random.randint(2, 5)]
        place = {kind: number for number, kind in enumerate(VICTIMS)} | {"kernel": self.random.uniform(2, 7)}
        on_the_way.sort(key=place.get)
        return [*on_the_way, rarest(ENDS)[0]][-most:]

    def kill(self, run, kind):
        """Wait for a process of this kind and kill it at a random moment of its life; False where none came."""
        ends_s, servers = time.monotonic() + PATIENCE_S, self.said().count("first token after")
        serves = kind in SERVING and self.random.random() < 0.25  # else it is mostly its start that is hit
        while run.poll() is None and time.monotonic() < ends_s:
            time.sleep(0.5)
            said = self.said()
            if kind in SERVING and "kvlab: 03_" in said:
                return False
            if kind not in self.living() or serves and said.count("first token after") == servers:
                continue
            time.sleep(min(self.random.expovariate(1 / SOON_S), 30))
            with suppress(psutil.Error, IndexError):
                self.random.choice(self.living().get(kind, [])).kill()
                return True
        return False

    def kill_round(self, counts, most):
        """Start a run, kill some of its processes, and look at what they leave."""
        before, started_s = self.lines(), time.monotonic()
        run = self.start(f"SET={self.set} full_cache_space_gib=0.066")  # so that a second server is started
        killed = [kind for kind in self.plan(counts, most) if self.kill(run, kind)]
        counts.update(killed)
        self.finish(run)
        wrong = self.wrong(before)
        if killed and not all(self.stale()) and " written, " not in self.said():
            wrong.append("a page without its mark")
        self.note(f"kill -9 {', '.join(killed) or 'nobody'}", len(killed), wrong, time.monotonic() - started_s)

    def kills(self, wanted):
        counts = Counter()
        while sum(counts.values()) < wanted and self.left_s() > RESERVE_S:
            if self.random.random() < 0.5:
                self.forget(0.4)
            self.kill_round(counts, wanted - sum(counts.values()))
        print(f"killed: {', '.join(f'{kind} {n}' for kind, n in sorted(counts.items()))}")

    def undisturbed(self, what="a run that nothing disturbs"):
        """Everything gets measured, and the pages carry no mark."""
        before, started_s = self.lines(), time.monotonic()
        wrong = self.unfinished(*self.finish(self.start())) + self.wrong(before)
        self.note(what, 1, wrong, time.monotonic() - started_s)

    def unfinished(self, code, said):
        """What is wrong with a run that could do all its work, as words."""
        if code is None:
            return ["not finished in its time"]
        wrong = [f"exit {code}: {why(said)}"] * (code != 0) + ["traceback"] * ("Traceback" in said)
        wrong += ["a page with a mark"] * any(self.stale())
        return wrong + [f"{name}: {reason}" for name, reason in sweep.unmeasured("smoke").items() if code == 0]

    def two_at_once(self):
        """The second run refuses while the first one measures, and the first is none the worse for it."""
        self.forget(0.3)
        before, started_s, first = self.lines(), time.monotonic(), self.start()
        while first.poll() is None and "01_machine" not in self.said():
            time.sleep(0.5)
        second = subprocess.run(
            [sys.executable, "-m", "kvlab", "report", "--profile", "smoke"], cwd=ROOT, capture_output=True, text=True,
            env=os.environ | {"KVLAB_OUTPUT": str(self.output)})  # fmt: skip
        refused = second.returncode == 2 and "another run is writing" in second.stderr
        wrong = ["the second run was not refused"] * (not refused)
        wrong += self.unfinished(*self.finish(first)) + self.wrong(before)
        self.note("two runs at once", 1, wrong, time.monotonic() - started_s)

    def clock_set_back(self):
        """Files from the future, as a clock that was set back leaves them: the page may not call itself outdated."""
        for path in self.results.rglob("*"):
            os.utime(path, (time.time() + 86_400,) * 2)
        self.undisturbed("clock set back by a day")

    def torn(self):
        """A record file cut at every byte of its last line, read back in this process."""
        started_s, path = time.monotonic(), self.output / "torn.jsonl"
        whole = (self.results / "s1b.jsonl").read_bytes()
        start, wrong = whole.rindex(b"\n", 0, -1) + 1, set()
        complete = len(records.load(self.results / "s1b.jsonl"))
        environment = records.environments(self.results)[-1]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for cut in range(start, len(whole)):
                path.write_bytes(whole[:cut])
                store = records.Store(path, environment)
                kept = complete - (cut < len(whole) - 1)
                store.append({"kind": "server", "repetition": 0, "status": "failed", "point": {}})
                wrong |= {"a record lost"} if len(records.load(path)) != kept + 1 else set()
        self.note("last line torn at every byte", len(whole) - start, sorted(wrong), time.monotonic() - started_s)

    def disk(self):
        """A full disk ends the run with a sentence and exit 1; a read-only one with exit 2 and nothing written."""
        folder = self.output / "disk"
        with mounted(folder) as remount:
            if remount is None:
                return self.note("full and read-only disk", 0, ["not tried: no mount here"], 0)
            shutil.copytree(self.results, folder / "results" / "smoke")
            used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            full = f"size={used // 1024 + 150}k"
            for what, options, expected in (("full disk", full, 1), ("read-only disk", "ro", 2)):
                started_s = time.monotonic()
                before = {path: path.read_bytes() for path in folder.rglob("*.jsonl")}
                remount(options)
                code, said = self.finish(self.start(output=folder))
                lost = [path.name for path, content in before.items() if not path.read_bytes().startswith(content)]
                wrong = [f"{name} lost lines" for name in lost] + ["traceback"] * ("Traceback" in said)
                # make itself ends with 2 whatever the command's own code was, and says that one
                wrong += [] if f"Error {expected}" in said and "cannot write results" in said else [why(said)]
                self.note(what, 1, wrong, time.monotonic() - started_s)
            remount("rw,size=1g")

    def bad_server(self):
        """A server hangs, breaks off, floods, sends garbage and dribbles in turn; S1b's memory runs out in that run."""
        self.forget(0.3)
        started_s = time.monotonic()
        before = {name: len(self.load(name)) for name in ("s1", "s1b")}
        with misbehaving() as port:
            settings = f"SET={self.set} base_url=http://127.0.0.1:{port} request_timeout_s=1.0 serving_min_requests=1 "
            run = self.start(settings + "serving_requests_per_stream=1 concurrencies=[1,4]")
            self.starve(run, before["s1b"])
            code, said = self.finish(run)
        s1, s1b = (self.load(name)[number:] for name, number in before.items())
        wrong = ["traceback"] * ("Traceback" in said) + ["a failure passed for a success"] * (code == 0)
        wrong += ["not finished in its time"] * (code is None)
        taken = any(r["status"] == "ok" for r in s1 if r["kind"] == "request")
        wrong += ["a bad answer was taken for a good one"] * taken
        wrong += ["nothing was recorded"] * (not s1) + ["a page without a warning"] * (not all(self.stale()))
        short = any(r["status"] == "out_of_memory" and not r["announced"] for r in s1b)
        wrong += ["no record says that memory ran out"] * (not short)
        self.note("bad server, memory runs out", len(s1) + len(s1b), wrong, time.monotonic() - started_s)

    def starve(self, run, measured):
        """Once S1b has recorded something, allow the worker next to no more memory than it has."""
        while run.poll() is None and self.left_s() > 0:
            time.sleep(0.2)
            if len(self.load("s1b")) > measured:
                for worker in self.living().get("worker", []):
                    with suppress(psutil.Error):
                        worker.rlimit(psutil.RLIMIT_AS, (worker.memory_info().vms + 2**23,) * 2)
                        return


def why(said):
    """The command's own last words, on one line."""
    return " / ".join(line for line in said.splitlines() if line.startswith("kvlab: "))[-300:]


@contextmanager
def mounted(folder):
    """A tmpfs at `folder`; yields a function that remounts it with other options, None where mounting is refused."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", folder], capture_output=True).returncode:
        yield None
        return
    try:
        yield lambda options: subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@contextmanager
def misbehaving():
    """A server on loopback that treats its requests badly in turn; yields its port."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    flood, garbage = b'data: {"choices": [{"text": "x"}]}\n\n' * 20_000, bytes(range(256)) * 8
    listener = socket.create_server(("127.0.0.1", 0))
    held = []

    def serve():
        for number in range(10**9):
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            held.append(connection)  # those that hang stay open
            with suppress(OSError):
                connection.settimeout(2)
                connection.recv(65536)
                answer = (b"", head + flood[:34], head + flood, head + garbage, head)[number % 5]
                connection.sendall(answer)
                while number % 5 == 4:  # slowly, until whoever waits has had enough
                    connection.sendall(flood[:34])
                    time.sleep(0.3)
                if answer:
                    connection.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.close()
        for connection in held:
            connection.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=50, help="kill -9 in all (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=20, help="at most (default: %(default)s)")
    parser.add_argument("--only", nargs="+", default=["kills", "two_at_once", "torn", "disk", "bad_server",
                                                      "clock_set_back"])  # fmt: skip
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    torture, started_s = Torture(asked.seed, asked.minutes), time.monotonic()
    try:
        for name in asked.only:
            if torture.left_s() < TOO_LATE_S:
                torture.note(name.replace("_", " "), 0, ["not tried: no time left, allow more --minutes"], 0)
            else:
                torture.kills(asked.kills) if name == "kills" else getattr(torture, name)()
    finally:
        torture.end_all()
        shutil.rmtree(torture.output, ignore_errors=True)
    bad = [row for row in torture.rows if row[2] != "nothing lost"]
    print(f"{len(torture.rows)} rounds, {len(bad)} with something wrong, seed {asked.seed}, "
          f"{(time.monotonic() - started_s) / 60:.1f} minutes")  # fmt: skip
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
