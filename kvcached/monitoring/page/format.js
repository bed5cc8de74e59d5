// Figures in words.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export const count = (number) => Math.round(number).toLocaleString("en");

export const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)}%`);

/** Three digits or more. */
export const rate = (number) => (number >= 100 || number === Math.round(number) ? count(number) : number.toFixed(1));

export function bytes(number) {
  let unit = 0;
  while (number >= 1024 && unit < UNITS.length - 1) {
    number /= 1024;
    unit += 1;
  }
  return `${number >= 100 || unit === 0 ? count(number) : number.toFixed(1)} ${UNITS[unit]}`;
}

export function latency(seconds) {
  if (seconds === null) return "–";
  if (seconds < 1e-3) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${(seconds * 1e3).toFixed(seconds < 0.1 ? 1 : 0)} ms`;
  return `${seconds.toFixed(1)} s`;
}

export function duration(seconds) {
  const whole = Math.floor(seconds);
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}

export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

export const words = (name) => name.replaceAll("_", " ");

/** What people call a namespace of the host pool. */
export const namespaceName = (each) => each.label || each.replicas.join(" + ") || "a cleared namespace";
