// The latest answers of one daemon, and what happened between two of them. What is kept is bounded.

const SAMPLES_MAX = 600;
/** Rates and percentiles are of this time: less would jump, as a request takes microseconds and comes seldom. */
const WINDOW_S = 10;

export class History {
  constructor() {
    this.samples = [];
    this.latest = null; // the last answer, whole
  }

  /** Take in an answer and what is occupied. Another epoch is another daemon, whose counters have begun at 0. */
  add(report, atS, occupied) {
    if (this.latest && this.latest.report.daemon_epoch !== report.daemon_epoch) this.samples = [];
    const { counters, requests, request_bounds_s, copies } = report;
    this.samples.push({ atS, report: { counters, requests, request_bounds_s, copies }, occupied });
    if (this.samples.length > SAMPLES_MAX) this.samples.shift();
    this.latest = { atS, report };
  }

  /** What `measure(earlier, later, seconds)` says at each sample about the time before it: `[time, value]`. */
  over(measure) {
    let from = 0;
    return this.samples.map((later, place) => {
      while (from < place - 1 && later.atS - this.samples[from].atS > WINDOW_S) from += 1;
      return [later.atS, place ? between(this.samples[Math.min(from, place - 1)], later, measure) : null];
    });
  }

  /** The same of the last `seconds` alone. */
  lately(seconds, measure) {
    const latest = this.samples[this.samples.length - 1];
    const earlier = this.samples.find((each) => latest.atS - each.atS <= seconds);
    return earlier === latest ? null : between(earlier, latest, measure);
  }

  /** How much a counter has grown since the oldest answer that is kept. */
  growth(name) {
    return grown(this.samples[0].report, this.latest.report, name);
  }
}

function between(earlier, later, measure) {
  return measure(earlier.report, later.report, later.atS - earlier.atS);
}

export const grown = (earlier, later, name) => (later.counters[name] ?? 0) - (earlier.counters[name] ?? 0);

/** Blocks of prompts by where they were found, as shares; null if nothing was asked for. */
export function hits(earlier, later) {
  const of = (name) => grown(earlier, later, name);
  const [device, missed] = [of("hit_blocks"), of("missed_blocks")];
  // Blocks in the host pool that were not loaded had to be computed: they are in `missed_blocks`, too.
  const host = of("host_hit_blocks") - of("load_below_threshold_blocks") - of("load_over_quota_blocks");
  const all = device + host + missed;
  return all > 0 ? { device: device / all, host: host / all, missed: missed / all, rate: (device + host) / all } : null;
}

/** Durations of a verb, by bucket. */
function durations(earlier, later, verb) {
  const of = (report) => report.requests.find((each) => each.verb === verb)?.counts ?? [];
  const before = of(earlier);
  return of(later).map((number, bucket) => number - (before[bucket] ?? 0));
}

/** The duration that a share of the requests of a verb did not exceed, in seconds; null without any. */
export function quantile(earlier, later, verb, share) {
  const counts = durations(earlier, later, verb);
  const bounds = later.request_bounds_s;
  const all = counts.reduce((sum, number) => sum + number, 0);
  if (!all) return null;
  let left = share * all;
  for (const [bucket, number] of counts.entries()) {
    if (number && left <= number) {
      const lower = bucket ? bounds[bucket - 1] : 0;
      return bucket < bounds.length ? lower + ((bounds[bucket] - lower) * left) / number : lower;
    }
    left -= number;
  }
  return bounds[bounds.length - 1];
}

/** Bytes that some copies have copied in a second. */
export function copied(earlier, later, seconds, isWanted) {
  const of = (report) => report.copies.filter(isWanted).reduce((sum, each) => sum + each.copied_bytes, 0);
  return (of(later) - of(earlier)) / seconds;
}
