// A chart over time with a legend, a description for screen readers and its numbers as a table. Draws with uPlot
// (vendor/), which puts itself into the global scope. Knows no server.

import { byId, element, fill, setText, table } from "./dom.js";
import { clock } from "./format.js";

/* global uPlot */

const HEIGHT = 190;
// Steps of an axis in bytes, so that its labels are whole.
const BINARY_STEPS = Array.from({ length: 50 }, (_, power) => 2 ** power);
const TABLE_ROWS = 12;

/** Colours come from the style sheet, so that both themes and the rest of the page agree with the charts. */
function colour(name) {
  const probe = byId("probe");
  probe.className = `tone-${name}`;
  return getComputedStyle(probe).color;
}

function isPowerOfTen(value) {
  const power = Math.log10(value);
  return Math.abs(power - Math.round(power)) < 1e-9;
}

/**
 * `series`: [{ label, tone, of(row) -> number | null, dash? }]. `format` writes a value with its unit. `stacked` piles the
 * series up in their order; `signed` has values below zero, which are shown without their sign; `log` is a logarithmic
 * scale; `binary` has an axis in powers of two; `top` is a fixed upper end.
 */
export class TimeChart {
  constructor(
    mount,
    { title, series, format, stacked = false, signed = false, log = false, binary = false, top = null },
  ) {
    Object.assign(this, { title, series, format, stacked, signed, log, binary, top });
    this._plot = null;
    this._rows = [];
    this._canvas = element("div", { class: "plot", role: "img", "aria-label": title });
    this._empty = element("p", { class: "empty" }, "Waiting for the first numbers.");
    this._values = series.map(() => element("span", { class: "value" }, "–"));
    const items = series.map((s, i) =>
      element(
        "li",
        {},
        element("span", { class: `swatch tone-${s.tone}`, "data-dash": s.dash ? "yes" : null }),
        s.label,
        this._values[i],
      ),
    );
    this._numbers = element("div", { class: "scroll" });
    this._details = element("details", {}, element("summary", {}, "Numbers"), this._numbers);
    this._details.addEventListener("toggle", () => this._writeTable());
    this._mount = mount;
    fill(mount, this._canvas, this._empty, element("ul", { class: "legend" }, items), this._details);
    const resize = () => this._plot?.setSize({ width: this._width(), height: HEIGHT });
    new ResizeObserver(() => requestAnimationFrame(resize)).observe(this._canvas);
  }

  /** Colours changed: build the plot anew. */
  restyle() {
    this._plot?.destroy();
    this._plot = null;
    if (this._rows.length) this._draw();
  }

  /** Show the rows of a history from `from` to `to` (seconds since the epoch). */
  show(rows, from, to) {
    this._from = from;
    this._to = to;
    let first = rows.length;
    while (first > 0 && rows[first - 1].t >= from) first -= 1;
    this._rows = rows.slice(Math.max(first - 1, 0));
    const hasData = this._rows.some((row) => this.series.some((s) => this._value(s, row) !== null));
    this._empty.hidden = hasData;
    this._canvas.hidden = !hasData;
    if (hasData) this._draw();
    this._label();
    this._writeTable();
  }

  /** What to say while there is nothing to draw. */
  setEmpty(text) {
    setText(this._empty, text);
  }

  _value(series, row) {
    return row.fill === null ? null : series.of(row);
  }

  _data() {
    const columns = this.series.map((s) => this._rows.map((row) => this._value(s, row)));
    if (this.stacked) {
      for (let i = 1; i < columns.length; i += 1) {
        columns[i] = columns[i].map((v, row) =>
          v === null || columns[i - 1][row] === null ? null : v + columns[i - 1][row],
        );
      }
      // The highest is drawn first, the lower ones over it.
      columns.reverse();
    }
    return [this._rows.map((row) => row.t), ...columns];
  }

  _width() {
    return Math.max(this._canvas.clientWidth, 200);
  }

  _draw() {
    if (this._canvas.hidden) return;
    if (!this._plot) this._plot = new uPlot(this._options(), this._data(), this._canvas);
    else this._plot.setData(this._data(), false);
    this._plot.batch(() => {
      this._plot.setScale("x", { min: this._from, max: this._to });
      this._plot.redraw(false, true);
    });
  }

  _range() {
    const values = this._data()
      .slice(1)
      .flat()
      .filter((v) => v !== null);
    if (this.log) {
      const positive = values.filter((v) => v > 0);
      if (!positive.length) return [0.001, 1];
      return [
        10 ** Math.floor(Math.log10(Math.min(...positive))),
        10 ** Math.ceil(Math.log10(Math.max(...positive)) + 0.05),
      ];
    }
    if (this.top !== null) return [0, this.top];
    const high = values.reduce((a, b) => Math.max(a, b), 0);
    const low = this.signed ? values.reduce((a, b) => Math.min(a, b), 0) : 0;
    return high === 0 && low === 0 ? [this.signed ? -1 : 0, 1] : [low * 1.1, high * 1.1];
  }

  _options() {
    const [text, grid, surface] = ["quiet", "grid", "surface"].map(colour);
    const font = "11px system-ui, sans-serif";
    const axis = { stroke: text, font, ticks: { show: false }, grid: { stroke: grid, width: 1 } };
    const shown = this.stacked ? [...this.series].reverse() : this.series;
    const series = shown.map((s) => {
      const line = colour(s.tone);
      return {
        label: s.label,
        stroke: line,
        width: this.stacked ? 1 : 1.75,
        dash: s.dash ? [5, 3] : undefined,
        fill: this.stacked ? colour(`${s.tone}-soft`) : undefined,
        points: { show: this.log, size: 4, fill: surface },
        spanGaps: false,
      };
    });
    return {
      width: this._width(),
      height: HEIGHT,
      legend: { show: false },
      cursor: { drag: { x: false, y: false }, sync: { key: "time" }, points: { size: 6 } },
      scales: {
        x: { time: true, auto: false, min: this._from, max: this._to },
        y: { distr: this.log ? 3 : 1, range: () => this._range() },
      },
      axes: [
        {
          ...axis,
          size: 28,
          space: 80,
          values: (_, splits) => splits.map((t) => clock(t, this._to - this._from <= 150)),
        },
        {
          ...axis,
          size: 74,
          space: 34,
          ...(this.binary ? { incrs: BINARY_STEPS } : {}),
          grid: { ...axis.grid, filter: (_, splits) => splits.map((v) => (this.log && !isPowerOfTen(v) ? null : v)) },
          values: (_, splits) => splits.map((v) => (v === null ? "" : this.format(Math.abs(v)))),
        },
      ],
      series: [{}, ...series],
      hooks: { setCursor: [(plot) => this._legend(plot.cursor.idx)] },
    };
  }

  /** The values under the cursor, or the latest ones. */
  _legend(index) {
    const row = this._rows[index ?? this._rows.length - 1];
    this.series.forEach((s, i) => {
      const value = row ? this._value(s, row) : null;
      setText(this._values[i], value === null ? "–" : this.format(Math.abs(value)));
    });
  }

  _label() {
    if (this._plot?.cursor.idx == null) this._legend(null);
    const now = this.series.map((s, i) => `${s.label} ${this._values[i].textContent}`).join(", ");
    this._canvas.setAttribute("aria-label", `${this.title}. Now: ${now}. The button “Numbers” below shows a table.`);
  }

  _writeTable() {
    if (!this._details.open) return;
    const step = Math.max(Math.floor(this._rows.length / TABLE_ROWS), 1);
    const picked = this._rows
      .filter((row, i) => row.fill !== null && (this._rows.length - 1 - i) % step === 0)
      .reverse();
    const rows = picked
      .slice(0, TABLE_ROWS)
      .map((row) => [
        clock(row.t),
        ...this.series.map((s) => (this._value(s, row) === null ? "–" : this.format(Math.abs(this._value(s, row))))),
      ]);
    fill(this._numbers, table(this.title, ["Time", ...this.series.map((s) => `>${s.label}`)], rows));
  }
}
