// What is said where the pointer is: of events and spans in the timeline, of points in the charts.

const tip = document.getElementById("tip");

// Texts come from the run: they are set as text, never as HTML.
function showTip(lines, x, y) {
  tip.replaceChildren();
  lines.filter((line) => line).forEach((line, at) => {
    const part = document.createElement(at === 0 ? "b" : "div");
    part.textContent = line;
    tip.append(part);
  });
  tip.hidden = false;
  const room = tip.getBoundingClientRect();
  const left = x + 16 + room.width > window.innerWidth ? x - 16 - room.width : x + 16;
  const top = Math.min(y + 16, window.innerHeight - room.height - 8);
  tip.style.left = `${Math.max(left, 4)}px`;
  tip.style.top = `${Math.max(top, 4)}px`;
}

function hideTip() {
  tip.hidden = true;
}

function sayBytes(size) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let at = 0;
  while (size >= 1023.5 && at < units.length - 1) {
    size /= 1024;
    at += 1;
  }
  return `${size >= 99.95 ? size.toFixed(0) : Number(size.toFixed(size >= 9.995 ? 1 : 2))} ${units[at]}`;
}

function sayLength(micros) {
  return micros >= 1e6 ? `${(micros / 1e6).toFixed(2)} s` : micros >= 1e3 ? `${(micros / 1e3).toFixed(2)} ms` : `${micros} µs`;
}

function describe(found, data) {
  const { rank, kind, at } = found;
  if (kind === "span") {
    const [name, , took, step] = rank.spans.slice(at, at + SPAN);
    return [data.texts[name], `rank ${rank.rank}${step < 0 ? "" : `, step ${step}`}`, sayLength(took)];
  }
  const [op, feature, label, , took, wait, , step, given, got, size, dtype] = rank.events.slice(at, at + EVENT);
  const lines = [`${data.texts[op]} ${data.texts[label]}`.trim()];
  lines.push(`${data.texts[feature]}, rank ${rank.rank}${step < 0 ? "" : `, step ${step}`}, ${size} ranks`);
  lines.push(`${sayBytes(given)} given, ${sayBytes(got)} got${data.texts[dtype] ? `, ${data.texts[dtype]}` : ""}`);
  lines.push(wait < 0 ? `${sayLength(took)}, all of it hidden` : `${sayLength(took)}, of which ${sayLength(took - wait)} waited`);
  return lines;
}

function installChartTips(figures, charts) {
  figures.forEach((figure, number) => {
    const svg = figure.querySelector("svg"), { x, texts } = charts[number];
    if (!svg) return;
    const cross = document.createElementNS("http://www.w3.org/2000/svg", "line");
    cross.setAttribute("class", "cross");
    cross.setAttribute("y1", 12);
    cross.setAttribute("y2", 190);
    cross.style.display = "none";
    svg.append(cross);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const at = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      let best = 0;
      x.forEach((place, index) => {
        if (Math.abs(place - at) < Math.abs(x[best] - at)) best = index;
      });
      cross.setAttribute("x1", x[best]);
      cross.setAttribute("x2", x[best]);
      cross.style.display = "";
      showTip(texts[best], event.clientX, event.clientY);
    });
    svg.addEventListener("pointerleave", () => {
      cross.style.display = "none";
      hideTip();
    });
  });
}
