"""What the cache leaves room for, as charts and a table: everything here is computed from configurations."""

from kvlab.article import drawing, prose
from kvlab.article.drawing import chart, label, read_by

KIND_COLOUR = {
    "multi_head": "#D55E00", "grouped": "#0072B2", "multi_query": "#56B4E9", "window": "#E69F00", "hybrid": "#CC79A7",
    "latent": "#009E73",
}  # fmt: skip
LINES = ("#D55E00", "#0072B2", "#56B4E9", "#E69F00", "#CC79A7")


def _kv_bytes_by_model(room):
    ordered = room.sort_values("kv_bytes_per_token")
    least, most = ordered.iloc[0], ordered.iloc[-1]
    grouped = room[room["kind"] == "grouped"].sort_values("shared").iloc[-1]
    return {
        "least": least["model"], "least_bytes": least["kv_bytes_per_token"], "most": most["model"],
        "most_bytes": most["kv_bytes_per_token"], "ratio": most["kv_bytes_per_token"] / least["kv_bytes_per_token"],
        "grouped": grouped["model"], "grouped_bytes": grouped["kv_bytes_per_token"], "shared": grouped["shared"],
        "every_head_bytes": grouped["multi_head_bytes_per_token"],
    }  # fmt: skip


@read_by(_kv_bytes_by_model)
@chart
def kv_bytes_by_model(room, language):
    """Bytes that one token adds to the cache, a bar per model, coloured by its kind of attention."""
    rows = room.sort_values("kv_bytes_per_token", ascending=False).to_dict("records")
    figure, (ax,) = drawing.panels(language, "kv_bytes_by_model", [""], height=0.9 + 0.3 * len(rows))
    for height, row in enumerate(rows):
        value, colour = row["kv_bytes_per_token"], KIND_COLOUR[row["kind"]]
        ax.barh(height, value, color=colour, height=0.7)
        text = f"  {prose.friendly(value, 'B', language)} · {label(row['kind'], language)}"
        ax.text(value, height, text, va="center", color=colour, fontsize=9)
    ax.set_yticks(range(len(rows)), [row["model"] for row in rows])
    ax.set(ylim=(len(rows) - 0.4, -0.6), xlim=(0, rows[0]["kv_bytes_per_token"] * 1.35 if rows else 1), xticks=[])
    ax.set_xlabel(label("kv_bytes_per_token", language))
    ax.grid(False)
    return figure


def _requests_by_context(lengths):
    """The model with the fewest requests against the one with the most, at the longest length that all can take."""
    longest = lengths.groupby("model")["context_length"].max().min()
    ordered = lengths[lengths["context_length"] == longest].sort_values("requests")
    (fewest, few), (most, many) = (tuple(ordered[["model", "requests"]].iloc[place]) for place in (0, -1))
    return {"context_length": longest, "fewest": fewest, "fewest_requests": few, "most": most, "most_requests": many}


@read_by(_requests_by_context)
@chart
def requests_by_context(lengths, language):
    """How many requests fit on the card over their length; computed, so dashed."""
    figure, (ax,) = drawing.panels(language, "requests_by_context", [""], height=3.9)
    ends = []
    for colour, (name, rows) in zip(LINES, lengths.groupby("model", sort=False)):
        ax.plot(rows["context_length"], rows["requests"], color=colour, linestyle="--", marker="o")
        ends.append((rows["requests"].iloc[-1], name, colour))
    drawing.octaves(ax, lengths["context_length"], language, "context_length")
    drawing.friendly_y([ax], "count", language, label("requests_that_fit", language))
    drawing.end_labels(ax, ends)
    return figure


def table(room, tokens, language):
    """Every model's weights, cache and room, most room first, with the sentence about heads and 8-bit caches."""
    rows = room.sort_values(["requests", "kv_bytes_per_token"], ascending=[False, True]).to_dict("records")
    prose.table(rows, "room", language, source="computed")
    possible = [row for row in rows if row["requests"] == row["requests"]]  # not missing
    best = max(possible, key=lambda row: row["requests"] / max(1, row["requests_multi_head"]), default=None)
    if best:
        told = ("model", "shared", "requests", "requests_multi_head", "requests_8_bit")
        numbers = {name: best[name] for name in told} | {"context_length": tokens}
        prose.say("memory.reading", language, source="computed", **numbers)
    for row in possible:
        if not row["requests"]:
            size = {"model": row["model"], "weight_bytes": row["weight_bytes"]}
            prose.say("memory.does_not_fit", language, source="computed", **size)
