// The top of the page: one card a tier, and the line of figures above them.

import { byId, element, fact, fill, setText } from "./dom.js";
import { ago, byteRate, bytes, compact, count, counted, duration, percent, shortHash } from "./format.js";

const NAMES = { device: "Device", host: "Host", disk: "Disk" };

class TierCard {
  constructor(tier) {
    this._title = element("h3", { id: `tier-${tier}` }, NAMES[tier]);
    this._share = element("span", { class: "big" });
    this._size = element("span", { class: "quiet" });
    this._bar = element("div", { class: "bar" });
    this._pinned = element("div", { class: "bar pinned" });
    this._meter = element(
      "div",
      {
        class: "meter",
        role: "meter",
        "aria-label": `${NAMES[tier]} occupancy`,
        "aria-valuemin": 0,
        "aria-valuemax": 100,
      },
      this._bar,
      this._pinned,
    );
    this._fault = element("p", { class: "problem" });
    this._facts = new Map();
    this._list = element("dl", { class: "facts" });
    this.node = element(
      "article",
      { class: `card tier tone-${tier}`, "aria-labelledby": `tier-${tier}` },
      element("header", {}, this._title, this._share, this._size),
      this._meter,
      this._fault,
      this._list,
    );
  }

  _set(term, value) {
    if (!this._facts.has(term)) {
      const pair = fact(term, "");
      this._facts.set(term, pair.lastChild);
      this._list.append(pair);
    }
    setText(this._facts.get(term), value);
  }

  update(tier) {
    this.node.classList.toggle("off", !tier.enabled);
    const problems = [tier.fault];
    if (tier.refusal) {
      const refused = counted(tier.num_refused_blocks, "block");
      problems.push(`${refused} refused, the first ${ago(tier.refusing_since_s)}: ${tier.refusal}`);
    }
    setText(this._fault, problems.filter(Boolean).join("; "));
    this._fault.hidden = !this._fault.textContent;
    this._list.hidden = this._meter.hidden = !tier.enabled;
    if (!tier.enabled) {
      setText(this._share, "off");
      setText(this._size, "");
      return;
    }
    const share = tier.capacity_nbytes > 0 ? tier.used_nbytes / tier.capacity_nbytes : 0;
    const pinned = tier.num_blocks > 0 ? (share * tier.num_pinned_blocks) / tier.num_blocks : 0;
    setText(this._share, percent(share));
    setText(this._size, `${bytes(tier.used_nbytes)} of ${bytes(tier.capacity_nbytes)}`);
    this._bar.style.width = `${Math.min(share * 100, 100)}%`;
    this._pinned.style.width = `${Math.min(pinned * 100, 100)}%`;
    this._meter.setAttribute("aria-valuenow", Math.round(share * 100));
    this._meter.setAttribute("aria-valuetext", `${percent(share)}, ${this._size.textContent}`);
    this._set("Blocks", `${count(tier.num_blocks)} of ${count(tier.capacity_blocks)}`);
    this._set("Hit tokens", compact(tier.hit_tokens));
    this._set("Pinned", `${count(tier.num_pinned_blocks)} of at most ${count(tier.pin_budget_blocks)}`);
    this._set("Retained", counted(tier.num_retained_blocks, "block"));
    this._set("Evicted", counted(tier.num_evictions, "block"));
    if (tier.tier !== "device") {
      this._set("Came down", counted(tier.num_spilled_blocks, "block"));
      this._set("Went up", counted(tier.num_restored_blocks, "block"));
      this._set("Reads at", byteRate(tier.read_nbytes_per_s));
      this._set("Writes at", byteRate(tier.write_nbytes_per_s));
      this._set("Queued", `${bytes(tier.queued_read_nbytes)} in, ${bytes(tier.queued_write_nbytes)} out`);
    }
    if (tier.num_dropped_blocks || tier.num_corrupt_blocks) {
      this._set("Lost", `${count(tier.num_dropped_blocks)} dropped, ${count(tier.num_corrupt_blocks)} corrupt`);
    }
  }
}

export class Overview {
  constructor() {
    this._cards = new Map();
    this._figures = new Map();
  }

  _figure(term, value, note = "") {
    if (!this._figures.has(term)) {
      const big = element("dd", { class: "big" });
      const small = element("dd", { class: "quiet" });
      byId("figures").append(element("div", { class: "figure" }, element("dt", {}, term), big, small));
      this._figures.set(term, [big, small]);
    }
    const [big, small] = this._figures.get(term);
    setText(big, value);
    setText(small, note);
  }

  update(report, hitShare) {
    for (const tier of report.tiers) {
      if (!this._cards.has(tier.tier)) {
        this._cards.set(tier.tier, new TierCard(tier.tier));
        byId("tiers").append(this._cards.get(tier.tier).node);
      }
      this._cards.get(tier.tier).update(tier);
    }
    const busy = report.num_requests_running + report.num_requests_waiting + report.num_requests_restoring;
    this._figure(
      "From the cache, last minute",
      percent(hitShare),
      hitShare === null ? "no prompts" : "of prompt tokens",
    );
    this._figure(
      "Prefill saved",
      duration(report.seconds_saved),
      `for ${duration(report.seconds_spent)} of waiting for restores`,
    );
    this._figure(
      "Requests",
      count(busy),
      `${count(report.num_requests_running)} running, ${count(report.num_requests_waiting)} waiting, ${count(report.num_requests_restoring)} restoring`,
    );
    this._figure("Not saved yet", counted(report.num_unsaved_blocks, "block"), "lost if the server were killed now");
    this._figure("Up for", duration(report.uptime_s), `${counted(report.num_pins, "pin")}`);
    setText(byId("model"), report.model);
    const gate = report.gate;
    const pays = Object.entries(gate.pays_from_tokens).map(
      ([tier, tokens]) => `${tier} ${tokens === null ? "does not" : `from ${counted(tokens, "token")}`}`,
    );
    fill(
      byId("about"),
      fact("Cost gate", gate.verdict),
      fact("Restoring pays", pays.join(", ") || "not measured yet"),
      fact(
        "Prefill",
        gate.prefill_tokens_per_s === null ? "not measured yet" : `${compact(gate.prefill_tokens_per_s)} tokens/s`,
      ),
      fact("Block", `${counted(report.block_size, "token")}, ${bytes(report.block_nbytes)}`),
      fact("Smallest hit", counted(report.min_hit_tokens, "token")),
      fact("Namespace", element("code", {}, shortHash(report.namespace))),
      fact("Store", report.store_id ? element("code", {}, shortHash(report.store_id)) : "none"),
    );
  }
}
