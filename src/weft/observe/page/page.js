// The page itself: its theme, the timeline's controls, and what is said at the pointer.

const root = document.documentElement;
const dark = window.matchMedia("(prefers-color-scheme: dark)");
root.dataset.theme = dark.matches ? "dark" : "light";

const numbers = JSON.parse(document.getElementById("numbers").textContent);
const canvas = document.getElementById("timeline");
const overview = document.getElementById("overview");
const timeline = new Timeline(canvas, overview, numbers.timeline);

function setTheme(theme) {
  root.dataset.theme = theme;
  timeline.draw();
  drawLegend();
}
dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
document.getElementById("theme").addEventListener("click", () => setTheme(root.dataset.theme === "dark" ? "light" : "dark"));

// The legend has what is on the timeline, and no more.
function drawLegend() {
  const { ranks, texts } = numbers.timeline, colors = timeline.colors();
  const spans = new Set(), features = new Set();
  for (const rank of ranks) {
    for (let i = 0; i < rank.spans.length; i += SPAN) spans.add(texts[rank.spans[i]]);
    for (let i = 0; i < rank.events.length; i += EVENT) features.add(texts[rank.events[i + 1]]);
  }
  const keys = [...spans].map((name) => [name, SPANS[name] || "#a3abb8"]);
  for (const name of features) keys.push([`${name} collectives`, timeline.featureColor(name, colors)]);
  const legend = document.getElementById("legend");
  legend.replaceChildren(...keys.map(([name, color]) => makeKey(name, color)));
  if (features.size) {
    legend.append(makeKey("the rank waits", `repeating-linear-gradient(135deg, ${colors.wait} 0 1px, ${colors.line} 1px 4px)`));
  }
}

function makeKey(name, background) {
  const key = document.createElement("span"), patch = document.createElement("i");
  key.className = "key";
  patch.style.background = background;
  key.append(patch, name);
  return key;
}

timeline.onchange = () => {
  const [from, to] = timeline.view;
  document.getElementById("range").textContent = `${sayLength(Math.round(to - from))} shown`;
};

// Zoom, move, point

canvas.addEventListener(
  "wheel",
  (event) => {
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) timeline.move(event.deltaX / timeline.width);
    else timeline.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), event.offsetX);
  },
  { passive: false },
);

let grabbed = null;
canvas.addEventListener("pointerdown", (event) => {
  grabbed = { x: event.offsetX, view: timeline.view };
  canvas.setPointerCapture(event.pointerId);
  canvas.classList.add("moving");
  hideTip();
});
canvas.addEventListener("pointermove", (event) => {
  if (grabbed) {
    const shift = ((grabbed.x - event.offsetX) / (timeline.width - GUTTER)) * (grabbed.view[1] - grabbed.view[0]);
    timeline.show([grabbed.view[0] + shift, grabbed.view[1] + shift]);
    return;
  }
  const found = timeline.find(event.offsetX, event.offsetY);
  const pointed = found && found.kind === "event" ? found : null;
  if (pointed?.at !== timeline.pointed?.at || pointed?.rank !== timeline.pointed?.rank) {
    timeline.pointed = pointed;
    timeline.draw();
  }
  if (found) showTip(describe(found, numbers.timeline), event.clientX, event.clientY);
  else hideTip();
});
for (const name of ["pointerup", "pointercancel"]) {
  canvas.addEventListener(name, () => {
    grabbed = null;
    canvas.classList.remove("moving");
  });
}
canvas.addEventListener("pointerleave", () => {
  hideTip();
  timeline.pointed = null;
  timeline.draw();
});
canvas.addEventListener("dblclick", () => timeline.show(timeline.full));
canvas.addEventListener("keydown", (event) => {
  const acts = {
    ArrowLeft: () => timeline.move(-0.2),
    ArrowRight: () => timeline.move(0.2),
    "+": () => timeline.zoom(0.6),
    "=": () => timeline.zoom(0.6),
    "-": () => timeline.zoom(1 / 0.6),
    l: () => timeline.show(timeline.lastSteps(1)),
    L: () => timeline.show(timeline.lastSteps(1)),
    0: () => timeline.show(timeline.full),
    Home: () => timeline.show(timeline.full),
  };
  if (acts[event.key]) {
    event.preventDefault();
    acts[event.key]();
  }
});

function centerAt(event) {
  const middle = (event.offsetX / timeline.width) * timeline.data.length;
  const half = (timeline.view[1] - timeline.view[0]) / 2;
  timeline.show([middle - half, middle + half]);
}
overview.addEventListener("pointerdown", (event) => {
  overview.setPointerCapture(event.pointerId);
  centerAt(event);
});
overview.addEventListener("pointermove", (event) => {
  if (event.buttons) centerAt(event);
});

document.getElementById("in").addEventListener("click", () => timeline.zoom(0.6));
document.getElementById("out").addEventListener("click", () => timeline.zoom(1 / 0.6));
document.getElementById("last").addEventListener("click", () => timeline.show(timeline.lastSteps(1)));
document.getElementById("all").addEventListener("click", () => timeline.show(timeline.full));

new ResizeObserver(() => timeline.resize()).observe(canvas.parentElement);
timeline.resize();
timeline.onchange();
drawLegend();
installChartTips(document.querySelectorAll(".chart"), numbers.charts);
