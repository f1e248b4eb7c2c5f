// The page: asks the server once a second, keeps what it said, and shows it.

import { Refused, Unreachable, explain, get, saveKey, savedKey, text } from "./api.js";
import { askToClear, askToFlush, askToVerify } from "./actions.js";
import { TimeChart } from "./charts.js";
import { ask, field, tell } from "./dialogs.js";
import { byId, element, fill, setText } from "./dom.js";
import { byteRate, clock, compact, counted, duration, percent } from "./format.js";
import { History, SOURCES, TIERS, TTFT_SPAN_S, parseLatencies } from "./history.js";
import { Lists } from "./lists.js";
import { Lookup } from "./lookup.js";
import { Prefixes } from "./prefixes.js";
import { Overview } from "./tiers.js";

const POLL_MS = 1000;
const SLOWEST_POLL_MS = 5000;
const SLOW_MS = 3000;
const THEME = "tieredkv.theme";

const history = new History();
const overview = new Overview();
const state = {
  tiers: [],
  pins: [],
  paused: false,
  failures: 0,
  downSince: null,
  turn: 0,
  asksForKey: true,
  tenant: false,
};

const charts = {
  fill: new TimeChart(byId("chart-fill"), {
    title: "Occupancy of the tiers",
    series: TIERS.map((tier) => ({ label: tier, tone: tier, of: (row) => row.fill[tier] })),
    format: percent,
    top: 1,
  }),
  flow: new TimeChart(byId("chart-flow"), {
    title: "Flow between the tiers, restored upwards, spilled downwards",
    series: [
      ...["host", "disk"].map((tier) => ({ label: `up from ${tier}`, tone: tier, of: (row) => row.up[tier] })),
      ...["host", "disk"].map((tier) => ({
        label: `down into ${tier}`,
        tone: tier,
        dash: true,
        of: (row) => (row.down[tier] === null ? null : -row.down[tier]),
      })),
    ],
    format: byteRate,
    signed: true,
    binary: true,
  }),
  tokens: new TimeChart(byId("chart-tokens"), {
    title: "Prompt tokens by source",
    series: SOURCES.map((source) => ({ label: source, tone: source, of: (row) => row.tokens[source] })),
    format: (value) => `${compact(value)} tok/s`,
    stacked: true,
  }),
  ttft: new TimeChart(byId("chart-ttft"), {
    title: "Time to first token by lowest source used, mean of the last half minute",
    series: SOURCES.map((source) => ({ label: source, tone: source, of: (row) => row.ttft[source] })),
    format: duration,
    log: true,
  }),
};
charts.ttft.setEmpty(`No request in the last ${TTFT_SPAN_S} seconds.`);

const prefixes = new Prefixes({ tiers: () => state.tiers, pins: () => state.pins, changed: pollLists });
const act = (done) => prefixes.act(done);
const lists = new Lists(act);
new Lookup({ tiers: () => state.tiers, act });

function drawCharts() {
  if (document.hidden) return;
  const now = Date.now() / 1000;
  const span = Number(byId("span").value);
  for (const chart of Object.values(charts)) chart.show(history.rows, now - span, now);
  const latencies = history.latencies();
  const seen = SOURCES.filter((source) => latencies[source]);
  const notes = seen.map(
    (s) => `${s}: ${counted(latencies[s].count, "request")}, 95 % within ${duration(latencies[s].p95)}`,
  );
  fill(
    byId("ttft-note"),
    notes.map((note) => element("li", {}, note)),
  );
}

function say(id, problem, ...content) {
  const banner = byId(id);
  if (banner.dataset.problem === problem) return;
  banner.dataset.problem = problem;
  fill(banner, ...content);
  banner.hidden = !problem;
}

/** What is for administrators only. */
function showAdminParts(shown) {
  for (const id of ["admin-part", "about", "flush", "verify"]) byId(id).hidden = !shown;
}

/** The server answered something: it is there. */
function connected() {
  if (state.downSince !== null) {
    tell(`The server answers again, after ${duration(Math.round(Date.now() / 1000 - state.downSince))}.`);
    state.downSince = null;
    prefixes.refresh();
  }
  state.failures = 0;
  say("down", "");
  setText(byId("status"), state.paused ? "paused" : "live");
  byId("status").className = `status ${state.paused ? "paused" : "live"}`;
}

function disconnected(error) {
  state.failures += 1;
  state.downSince ??= Date.now() / 1000;
  history.gap(Date.now() / 1000);
  say(
    "down",
    String(state.downSince),
    `${error.message} No numbers since ${clock(state.downSince)}; this page keeps trying.`,
  );
  setText(byId("status"), "no answer");
  byId("status").className = "status down";
  drawCharts();
}

function refused(error) {
  connected();
  setText(byId("status"), "no access");
  byId("status").className = "status down";
  say("refused", `${error.status} ${error.message}`, explain(error));
  // A tenant's key opens its own prefixes, pins and jobs, but not the report on all tiers.
  state.tenant = error.status === 403 && savedKey() !== "";
  showAdminParts(false);
  if (error.status === 401 && state.asksForKey && !document.querySelector("dialog[open]")) {
    state.asksForKey = false;
    askForKey();
  }
}

async function pollCache() {
  const slow = setTimeout(() => setText(byId("status"), "waiting for an answer"), SLOW_MS);
  const report = await get("admin/cache").finally(() => clearTimeout(slow));
  connected();
  say("refused", "");
  state.tenant = false;
  showAdminParts(true);
  state.tiers = report.tiers;
  const now = Date.now() / 1000;
  history.add(now, report);
  overview.update(report, history.hitShare(60));
  lists.showJobs(report.jobs);
}

async function pollLatencies() {
  try {
    history.addLatencies(Date.now() / 1000, parseLatencies(await text("metrics")));
    charts.ttft.setEmpty(`No request in the last ${TTFT_SPAN_S} seconds.`);
  } catch (error) {
    if (error instanceof Unreachable) throw error;
    charts.ttft.setEmpty("The server's /metrics cannot be read from here.");
  }
}

async function pollLists() {
  try {
    state.pins = (await get("admin/pins")).pins;
    lists.showPins(state.pins);
    if (state.tenant) lists.showJobs((await get("admin/jobs")).jobs);
  } catch (error) {
    if (error instanceof Unreachable) return;
    if (!(error instanceof Refused)) throw error;
    state.pins = [];
    lists.showPins([]);
    lists.showJobs([]);
  }
}

async function poll() {
  if (!state.paused) {
    try {
      if (state.turn % 2 === 0) await pollLatencies();
      await pollCache();
      drawCharts();
      if (state.turn % 3 === 0) await pollLists();
    } catch (error) {
      if (error instanceof Unreachable) disconnected(error);
      else if (error instanceof Refused) {
        refused(error);
        await pollLists();
      } else throw error;
    } finally {
      state.turn += 1;
      schedule();
    }
  } else schedule();
}

function schedule() {
  clearTimeout(state.timer);
  state.timer = setTimeout(poll, Math.min(POLL_MS * 2 ** Math.max(state.failures - 1, 0), SLOWEST_POLL_MS));
}

async function askForKey() {
  const input = element("input", {
    name: "key",
    type: "password",
    autocomplete: "off",
    spellcheck: "false",
    value: savedKey(),
  });
  const done = await ask({
    title: "Admin key",
    content: [
      field("Key", input, "It is kept in this tab only, until the tab is closed."),
      element(
        "p",
        { class: "quiet" },
        "Leave it empty to forget it. A tenant's key shows that tenant's prefixes, pins and jobs.",
      ),
    ],
    confirm: "Use it",
    submit: async (values) => saveKey(values.key.trim()),
  });
  if (!done) return;
  say("refused", "");
  await poll();
  await Promise.all([prefixes.restart(), pollLists()]);
}

function applyTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  setText(byId("theme"), { light: "Light", dark: "Dark" }[theme] ?? "Auto");
  byId("theme").setAttribute("aria-label", `Theme: ${{ light: "light", dark: "dark" }[theme] ?? "as the system"}`);
  for (const chart of Object.values(charts)) chart.restyle();
}

function nextTheme() {
  const order = ["", "light", "dark"];
  const next = order[(order.indexOf(localStorage.getItem(THEME) ?? "") + 1) % order.length];
  localStorage.setItem(THEME, next);
  applyTheme(next);
}

byId("theme").addEventListener("click", nextTheme);
byId("key").addEventListener("click", askForKey);
byId("pause").addEventListener("click", () => {
  state.paused = !state.paused;
  byId("pause").setAttribute("aria-pressed", String(state.paused));
  setText(byId("status"), state.paused ? "paused" : "live");
  byId("status").className = `status ${state.paused ? "paused" : "live"}`;
});
byId("span").addEventListener("change", drawCharts);
byId("clear-all").addEventListener("click", () => act(askToClear(state.tiers)));
byId("flush").addEventListener("click", () => act(askToFlush()));
byId("verify").addEventListener("click", () => act(askToVerify()));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
  applyTheme(localStorage.getItem(THEME) ?? ""),
);

applyTheme(localStorage.getItem(THEME) ?? "");
poll();
prefixes.refresh();
