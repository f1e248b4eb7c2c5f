// Numbers with their units, for people. Knows no element.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export const NOTHING = "–";

function known(value) {
  return typeof value === "number" && Number.isFinite(value);
}

export function count(value) {
  return known(value) ? whole.format(value) : NOTHING;
}

/** A count of things: "1 block", "2 blocks", "2 branches". */
export function counted(value, noun, plural = `${noun}s`) {
  return `${count(value)} ${value === 1 ? noun : plural}`;
}

/** Three digits and a letter: 12.3K. */
export function compact(value) {
  return known(value) ? short.format(value) : NOTHING;
}

/** Three digits that count. */
function digits(value) {
  return Math.abs(value) >= 1000 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
}

export function bytes(value) {
  if (!known(value)) return NOTHING;
  let size = value;
  let unit = 0;
  while (Math.abs(size) >= 1024 && unit < UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${digits(size)} ${UNITS[unit]}`;
}

export function byteRate(value) {
  return known(value) ? `${bytes(value)}/s` : NOTHING;
}

export function percent(share) {
  if (!known(share)) return NOTHING;
  const value = share * 100;
  return `${value > 0 && value < 10 ? value.toFixed(1) : value.toFixed(0)} %`;
}

/** A length of time from microseconds to days. */
export function duration(seconds) {
  if (!known(seconds)) return NOTHING;
  if (seconds === 0) return "0 s";
  if (seconds < 0.001) return `${digits(seconds * 1e6)} µs`;
  if (seconds < 1) return `${digits(seconds * 1000)} ms`;
  if (seconds < 120) return `${digits(seconds)} s`;
  if (seconds < 7200) return `${digits(seconds / 60)} min`;
  if (seconds < 172800) return `${digits(seconds / 3600)} h`;
  return `${digits(seconds / 86400)} days`;
}

/** How long ago a moment (seconds since the epoch) was, by this machine's clock. */
export function ago(moment) {
  if (!known(moment)) return NOTHING;
  const past = Date.now() / 1000 - moment;
  return past < 1.5 ? "now" : `${duration(Math.round(past))} ago`;
}

/** How long until a moment. */
export function until(moment) {
  if (!known(moment)) return "never";
  const left = moment - Date.now() / 1000;
  return left <= 0 ? "now" : `in ${duration(left < 120 ? Math.ceil(left) : left)}`;
}

export function clock(moment, withSeconds = true) {
  const options = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
  if (withSeconds) options.second = "2-digit";
  return new Date(moment * 1000).toLocaleTimeString("en", options);
}

/** The beginning of a hash, enough to tell rows apart. */
export function shortHash(hash) {
  return hash ? hash.slice(0, 12) : NOTHING;
}
