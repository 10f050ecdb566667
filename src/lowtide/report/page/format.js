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

// The bytes that somebody has typed, as lowtide.units reads them in Python; null for anything else.
function parseBytes(text) {
  const match = /^\s*(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?b?)\s*$/i.exec(text);
  if (!match) return null;
  const [, number, prefix, rest] = match;
  if (!prefix && (rest.toLowerCase() === "i" || (!rest && number.includes(".")))) return null;
  // A prefix alone is binary: 8G is 8 GiB.
  const base = prefix && rest.toLowerCase() !== "b" ? 1024 : 1000;
  return Math.floor(Number(number) * base ** (prefix ? "kmgtp".indexOf(prefix.toLowerCase()) + 1 : 0));
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

function signedPercent(share) {
  return `${share < 0 ? "−" : "+"}${formatPercent(Math.abs(share))}`;
}

function formatCount(number, one, many) {
  return number === 1 ? `1 ${one}` : `${number.toLocaleString("en")} ${many}`;
}
