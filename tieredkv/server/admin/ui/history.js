// Keeps what the page has seen: one row a poll, with rates made of the server's counters. Knows no element.
//
// A row: { t, fill: {device, host, disk}, down: {host, disk}, up: {host, disk}, tokens: {device, host, disk, computed},
// ttft: {device, host, disk, computed} }, t in seconds since the epoch, fill a share of the capacity, down and up in bytes a
// second, tokens in tokens a second, ttft in seconds. null where nothing is known; a row of null is a gap in the charts.

export const TIERS = ["device", "host", "disk"];
export const SOURCES = ["device", "host", "disk", "computed"];
const KEPT_S = 3700;
const RATE_SPAN_S = 3;
export const TTFT_SPAN_S = 30;
// A pause this long is shown as one. An engine that computes a long prompt on a CPU answers late.
const GAP_S = 25;

function countersOf(report) {
  const values = { "tokens.computed": report.computed_tokens };
  for (const tier of report.tiers) {
    values[`tokens.${tier.tier}`] = tier.hit_tokens;
    if (tier.tier === "device") continue;
    values[`down.${tier.tier}`] = tier.num_spilled_blocks * report.block_nbytes;
    values[`up.${tier.tier}`] = tier.num_restored_blocks * report.block_nbytes;
  }
  return values;
}

function pick(values, group, names) {
  return Object.fromEntries(names.map((name) => [name, values?.[`${group}.${name}`] ?? null]));
}

export class History {
  constructor() {
    this.rows = [];
    this._counters = [];
    this._latencies = [];
    this._epoch = null;
  }

  /** Take in a cache report that was read at `t`. */
  add(t, report) {
    const counters = countersOf(report);
    const last = this._counters.at(-1);
    const restarted =
      report.event_epoch !== this._epoch || (last && Object.keys(counters).some((k) => counters[k] < last.values[k]));
    if (last && (restarted || t - last.t > GAP_S)) this.gap(t - 0.001);
    if (restarted || (last && t - last.t > GAP_S)) this._counters = [];
    if (restarted) this._latencies = [];
    this._epoch = report.event_epoch;
    this._counters.push({ t, values: counters });
    while (this._counters.length > 2 && this._counters[1].t <= t - RATE_SPAN_S) this._counters.shift();
    const first = this._counters[0];
    const rates = {};
    if (first.t < t) {
      for (const key of Object.keys(counters)) rates[key] = (counters[key] - first.values[key]) / (t - first.t);
    }
    const fill = Object.fromEntries(
      report.tiers.map((tier) => [
        tier.tier,
        tier.capacity_nbytes > 0 ? tier.used_nbytes / tier.capacity_nbytes : null,
      ]),
    );
    this.rows.push({
      t,
      fill: { device: null, host: null, disk: null, ...fill },
      down: pick(rates, "down", ["host", "disk"]),
      up: pick(rates, "up", ["host", "disk"]),
      tokens: pick(rates, "tokens", SOURCES),
      ttft: this._meanLatencies(),
    });
    while (this.rows[0].t < t - KEPT_S) this.rows.shift();
  }

  /** Nothing is known at `t`. */
  gap(t) {
    if (this.rows.at(-1)?.fill === null) return;
    this.rows.push({ t, fill: null, down: null, up: null, tokens: null, ttft: null });
  }

  /** Take in the time-to-first-token histograms (see `parseLatencies`) that were read at `t`. */
  addLatencies(t, histograms) {
    const last = this._latencies.at(-1);
    if (last && SOURCES.some((s) => (histograms[s]?.count ?? 0) < (last.histograms[s]?.count ?? 0)))
      this._latencies = [];
    this._latencies.push({ t, histograms });
    while (this._latencies.length > 2 && this._latencies[1].t <= t - TTFT_SPAN_S) this._latencies.shift();
  }

  /** By source, over the last half minute: { count, mean, p95 }, or null without a request. */
  latencies() {
    const last = this._latencies.at(-1);
    const first = this._latencies[0];
    return Object.fromEntries(SOURCES.map((s) => [s, last ? between(first.histograms[s], last.histograms[s]) : null]));
  }

  _meanLatencies() {
    const now = this.latencies();
    return Object.fromEntries(SOURCES.map((s) => [s, now[s]?.mean ?? null]));
  }

  /** The part of all prompt tokens of the last `seconds` that no tier had to compute; null without any. */
  hitShare(seconds) {
    const from = (this.rows.at(-1)?.t ?? 0) - seconds;
    let cached = 0;
    let all = 0;
    for (let i = this.rows.length - 1; i >= 0 && this.rows[i].t >= from; i -= 1) {
      const { tokens } = this.rows[i];
      if (!tokens) continue;
      for (const s of SOURCES) {
        all += tokens[s] ?? 0;
        if (s !== "computed") cached += tokens[s] ?? 0;
      }
    }
    return all > 0 ? cached / all : null;
  }
}

function between(first, last) {
  if (!first || !last || last.count <= first.count) return null;
  const num = last.count - first.count;
  const wanted = 0.95 * num;
  let p95 = null;
  let below = 0;
  let low = 0;
  for (const [bound, total] of last.buckets) {
    const upTo = total - (first.buckets.get(bound) ?? 0);
    if (upTo >= wanted) {
      // Within a bucket, as if its observations were spread evenly.
      p95 = Number.isFinite(bound) ? low + ((bound - low) * (wanted - below)) / Math.max(upTo - below, 1) : low;
      break;
    }
    below = upTo;
    low = bound;
  }
  return { count: num, mean: (last.sum - first.sum) / num, p95 };
}

const SERIES = /^\S*?time_to_first_token_by_source_seconds_(bucket|sum|count)\{(.*)\} (\S+)$/;

/**
 * The histograms of time to first token by source out of Prometheus' text format:
 * { source: { count, sum, buckets: Map(upper bound -> cumulative count) } }. The names' prefix is the server's choice.
 */
export function parseLatencies(text) {
  const found = {};
  for (const line of text.split("\n")) {
    if (!line.includes("time_to_first_token_by_source_seconds_")) continue;
    const match = SERIES.exec(line);
    const source = match && /source="([^"]*)"/.exec(match[2])?.[1];
    if (!source) continue;
    found[source] ??= { count: 0, sum: 0, buckets: new Map() };
    const value = Number(match[3]);
    if (match[1] === "bucket") {
      const bound = /le="([^"]*)"/.exec(match[2])?.[1];
      found[source].buckets.set(bound === "+Inf" ? Infinity : Number(bound), value);
    } else found[source][match[1]] = value;
  }
  return found;
}
