// Numbers for people, as lowtide.units prints them in Python.

const UNITS = [["TiB", 4], ["GiB", 3], ["MiB", 2]];

function formatBytes(bytes) {
  if (bytes < 1024) return `${Math.round(bytes)} B`;
  for (const [unit, power] of UNITS) {
    // From here on it would print as 1024 of the smaller unit.
    if (bytes >= 1023.995 * 1024 ** (power - 1)) return `${(bytes / 1024 ** power).toFixed(2)} ${unit}`;
  }
  return `${(bytes / 1024).toFixed(2)} KiB`;
}

function formatSeconds(seconds) {
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  if (seconds >= 1e-3) return `${(seconds * 1e3).toFixed(1)} ms`;
  return `${(seconds * 1e6).toFixed(1)} µs`;
}

function formatBandwidth(bytesPerSecond) {
  for (const [unit, factor] of [["GB/s", 1e9], ["MB/s", 1e6], ["kB/s", 1e3]]) {
    if (bytesPerSecond >= factor) return `${Number((bytesPerSecond / factor).toPrecision(4))} ${unit}`;
  }
  return `${bytesPerSecond} B/s`;
}

function formatPercent(share) {
  const percent = 100 * share;
  return `${percent.toFixed(Math.abs(percent) < 9.95 ? 1 : 0)}\u00a0%`; // the space does not break
}

function formatCount(number, one, many) {
  return number === 1 ? `1 ${one}` : `${number.toLocaleString("en")} ${many}`;
}
