// The timeline: what each rank did when, drawn on a canvas. Times are microseconds from the first moment.
// A rank has a lane of what it computed and, below, one of its collectives, in rows where they overlap.

const SPAN = 4, EVENT = 12; // numbers of one, as page_data.py writes them
const GUTTER = 74, HEAD = 40;
const FEATURES = { ddp: 0, fsdp: 2, tp: 1, clip: 3, join: 4, zero: 5, user: 7 };
const SPANS = { forward: "#8fb3dd", backward: "#6b93c9", optimizer: "#a99bd6", data: "#a3c08c", checkpoint: "#d3b27f" };

class Timeline {
  constructor(canvas, overview, data) {
    this.canvas = canvas;
    this.overview = overview;
    this.data = data;
    this.full = [0, data.length];
    this.view = this.lastSteps(Math.min(3, data.steps.length));
    this.pointed = null; // the event under the pointer
    this.onchange = () => {};
    this.place();
  }

  // Views

  lastSteps(count) {
    const steps = this.data.steps.slice(-Math.max(count, 1));
    if (!steps.length) return [...this.full];
    const margin = (steps[steps.length - 1][2] - steps[0][1]) * 0.01;
    return this.limited([steps[0][1] - margin, steps[steps.length - 1][2] + margin]);
  }

  limited([from, to]) {
    const all = this.data.length;
    const width = Math.min(Math.max(to - from, 5), all * 1.02);
    const start = Math.min(Math.max(from, -0.01 * all), 1.01 * all - width);
    return [start, start + width];
  }

  show(view) {
    this.view = this.limited(view);
    this.draw();
    this.onchange();
  }

  zoom(factor, x) {
    const [from, to] = this.view;
    const at = x === undefined ? (from + to) / 2 : this.timeAt(x);
    this.show([at - (at - from) * factor, at + (to - at) * factor]);
  }

  move(share) {
    const width = this.view[1] - this.view[0];
    this.show([this.view[0] + share * width, this.view[1] + share * width]);
  }

  timeAt(x) {
    const [from, to] = this.view;
    return from + ((x - GUTTER) / Math.max(this.width - GUTTER, 1)) * (to - from);
  }

  // Places

  place() {
    const count = this.data.ranks.length;
    const [bar, row, gap] = count <= 4 ? [30, 17, 16] : count <= 16 ? [20, 12, 10] : count <= 32 ? [13, 8, 6] : [10, 6, 4];
    this.bar = bar;
    this.row = row;
    this.tops = [];
    let y = HEAD + gap / 2;
    for (const rank of this.data.ranks) {
      this.tops.push(y);
      y += bar + 2 + rank.rows * row + gap;
    }
    this.height = y + 4;
    this.gap = gap;
  }

  resize() {
    const scale = window.devicePixelRatio || 1;
    for (const [canvas, height] of [[this.canvas, this.height], [this.overview, 40]]) {
      const width = canvas.clientWidth;
      canvas.style.height = `${height}px`;
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.getContext("2d").setTransform(scale, 0, 0, scale, 0, 0);
    }
    this.width = this.canvas.clientWidth;
    this.draw();
  }

  // What lies under a place of the canvas: {rank, kind, at}, or null.
  find(x, y) {
    const at = this.tops.findLastIndex((top) => y >= top);
    if (at < 0 || x < GUTTER) return null;
    const rank = this.data.ranks[at];
    const time = this.timeAt(x), slack = (2 * (this.view[1] - this.view[0])) / this.width;
    const below = y - this.tops[at] - this.bar - 2;
    if (below < 0) return this.findSpan(rank, time, slack);
    const row = Math.floor(below / this.row);
    let best = null, length = Infinity;
    for (let i = 0; i < rank.events.length; i += EVENT) {
      const start = rank.events[i + 3], took = rank.events[i + 4];
      if (rank.events[i + 6] === row && time >= start - slack && time <= start + took + slack && took < length) {
        [best, length] = [i, took];
      }
    }
    return best === null ? null : { rank, kind: "event", at: best };
  }

  findSpan(rank, time, slack) {
    let best = null, length = Infinity;
    for (let i = 0; i < rank.spans.length; i += SPAN) {
      const start = rank.spans[i + 1], took = rank.spans[i + 2];
      if (time >= start - slack && time <= start + took + slack && took < length) [best, length] = [i, took];
    }
    return best === null ? null : { rank, kind: "span", at: best };
  }

  // Drawing

  colors() {
    const style = getComputedStyle(document.documentElement);
    const get = (name) => style.getPropertyValue(name).trim();
    return {
      ink: get("--ink"), soft: get("--soft"), line: get("--line"), faint: get("--faint"), card: get("--card"),
      accent: get("--accent"), wait: get("--wait"), compute: Number(get("--compute")),
      series: [0, 1, 2, 3, 4, 5, 6, 7].map((number) => get(`--s${number}`)),
    };
  }

  featureColor(name, colors) {
    if (name in FEATURES) return colors.series[FEATURES[name]];
    let sum = 0;
    for (const sign of name) sum += sign.codePointAt(0);
    return colors.series[[6, 3, 4, 5][sum % 4]];
  }

  draw() {
    if (!this.width) return;
    const colors = (this.palette = this.colors());
    const pen = this.canvas.getContext("2d");
    pen.clearRect(0, 0, this.width, this.height);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    this.drawSteps(pen, colors);
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER, 0, this.width - GUTTER, this.height);
    pen.clip();
    const hatch = makeHatch(colors.wait);
    this.data.ranks.forEach((rank, at) => this.drawRank(pen, rank, this.tops[at], colors, hatch));
    pen.restore();
    this.drawNames(pen, colors);
    this.drawOverview(colors);
    this.canvas.dataset.from = this.view[0];
    this.canvas.dataset.to = this.view[1];
  }

  x(time) {
    return GUTTER + ((time - this.view[0]) / (this.view[1] - this.view[0])) * (this.width - GUTTER);
  }

  drawSteps(pen, colors) {
    pen.textAlign = "left";
    // Ranks begin a step at different times: it is drawn from the first one's start to the next step's.
    this.data.steps.forEach(([number, start, end], at, steps) => {
      const next = at + 1 < steps.length ? steps[at + 1][1] : end;
      const from = Math.max(this.x(start), GUTTER), to = Math.min(this.x(next), this.width);
      if (to <= from) return;
      if (at % 2 === 0) {
        pen.fillStyle = colors.faint;
        pen.fillRect(from, 0, to - from, this.height);
      }
      pen.fillStyle = colors.ink;
      const text = to - from > 64 ? `step ${number}` : `${number}`;
      if (to - from > pen.measureText(text).width + 8) pen.fillText(text, from + 5, 11);
    });
    const width = this.view[1] - this.view[0];
    const tick = niceTick(width / Math.max((this.width - GUTTER) / 110, 2));
    pen.strokeStyle = colors.line;
    pen.lineWidth = 1;
    for (let time = Math.ceil(this.view[0] / tick) * tick; time <= this.view[1]; time += tick) {
      const x = Math.round(this.x(time)) + 0.5;
      pen.beginPath();
      pen.moveTo(x, 22);
      pen.lineTo(x, this.height);
      pen.stroke();
      pen.fillStyle = colors.soft;
      pen.fillText(sayMicros(time, tick), x + 4, 29);
    }
  }

  drawRank(pen, rank, top, colors, hatch) {
    const [from, to] = this.view;
    const texts = this.data.texts;
    for (let i = 0; i < rank.spans.length; i += SPAN) {
      const start = rank.spans[i + 1], took = rank.spans[i + 2];
      if (start > to || start + took < from) continue;
      const name = texts[rank.spans[i]];
      const x = this.x(start), width = Math.max(this.x(start + took) - x - 0.5, 0.7);
      pen.globalAlpha = colors.compute;
      pen.fillStyle = SPANS[name] || "#a3abb8";
      pen.fillRect(x, top, width, this.bar);
      pen.globalAlpha = 1;
    }
    this.drawEvents(pen, rank, top, colors, hatch);
    for (let i = 0; i < rank.spans.length && this.bar >= 13; i += SPAN) {
      const x = this.x(rank.spans[i + 1]), end = this.x(rank.spans[i + 1] + rank.spans[i + 2]);
      if (end > GUTTER && x < this.width) this.write(pen, texts[rank.spans[i]], x, end - x, top + this.bar / 2, "#14233a");
    }
  }

  drawEvents(pen, rank, top, colors, hatch) {
    const [from, to] = this.view;
    const texts = this.data.texts;
    const base = top + this.bar + 2;
    const drawn = [];
    for (let i = 0; i < rank.events.length; i += EVENT) {
      const start = rank.events[i + 3], took = rank.events[i + 4];
      if (start > to || start + took < from) continue;
      const row = rank.events[i + 6], x = this.x(start), end = this.x(start + took);
      const waited = rank.events[i + 5] >= 0;
      if (end - x < 1 && !waited && Math.floor(x) === drawn[row]) continue; // a pixel of many
      drawn[row] = Math.floor(x);
      const width = Math.max(end - x - (end - x > 3 ? 0.7 : 0), 1), y = base + row * this.row;
      pen.fillStyle = this.featureColor(texts[rank.events[i + 1]], colors);
      pen.fillRect(x, y, width, this.row - 1.5);
      if (waited) {
        const wait = this.x(start + rank.events[i + 5]);
        const length = Math.max(end - wait, 0.7);
        pen.fillStyle = hatch;
        pen.fillRect(wait, y, length, this.row - 1.5);
        pen.fillRect(wait, top, length, this.bar);
        pen.globalAlpha = 0.16;
        pen.fillStyle = colors.wait;
        pen.fillRect(wait, y, length, this.row - 1.5);
        pen.globalAlpha = 0.3;
        pen.fillRect(wait, top, length, this.bar);
        pen.globalAlpha = 1;
      }
      if (this.row >= 12) {
        this.write(pen, texts[rank.events[i + 2]] || texts[rank.events[i]], x, width, y + this.row / 2 - 0.5, "#fff");
      }
      if (this.isPointed(rank, i)) {
        pen.strokeStyle = colors.ink;
        pen.lineWidth = 2;
        pen.strokeRect(x - 1, y - 1, width + 2, this.row + 0.5);
      }
    }
  }

  // Whether it is the same collective as the one under the pointer, on this rank or another.
  isPointed(rank, at) {
    if (!this.pointed) return false;
    const other = this.pointed.rank.events, here = rank.events, from = this.pointed.at;
    return [0, 1, 2, 7, 10].every((field) => other[from + field] === here[at + field]);
  }

  write(pen, text, x, width, y, color) {
    const left = Math.max(x, GUTTER) + 5, room = Math.min(x + width, this.width) - left - 3;
    if (room < 22) return;
    if (pen.measureText(text).width > room) {
      const signs = Math.floor(text.length * (room / pen.measureText(text).width)) - 1;
      if (signs < 3) return;
      text = `${text.slice(0, signs)}…`;
    }
    pen.fillStyle = color;
    pen.fillText(text, left, y);
  }

  drawNames(pen, colors) {
    pen.textAlign = "right";
    const every = Math.ceil(13 / (this.bar + this.row + this.gap));
    this.data.ranks.forEach((rank, at) => {
      if (at % every) return;
      pen.fillStyle = colors.ink;
      pen.fillText(`rank ${rank.rank}`, GUTTER - 10, this.tops[at] + this.bar / 2);
      if (this.bar >= 20) {
        pen.fillStyle = colors.soft;
        pen.fillText("collectives", GUTTER - 10, this.tops[at] + this.bar + 2 + this.row / 2);
      }
    });
    pen.textAlign = "left";
  }

  drawOverview(colors) {
    const pen = this.overview.getContext("2d"), all = this.data.length, width = this.width;
    const x = (time) => (time / all) * width;
    pen.clearRect(0, 0, width, 40);
    const height = 32 / this.data.ranks.length;
    this.data.ranks.forEach((rank, at) => {
      const y = 4 + at * height;
      pen.fillStyle = SPANS.backward;
      pen.globalAlpha = 0.75;
      for (let i = 0; i < rank.spans.length; i += SPAN) {
        pen.fillRect(x(rank.spans[i + 1]), y, Math.max(x(rank.spans[i + 2]), 0.5), Math.max(height - 1, 0.5));
      }
      pen.fillStyle = colors.wait;
      pen.globalAlpha = 0.5;
      for (let i = 0; i < rank.events.length; i += EVENT) {
        const wait = rank.events[i + 5];
        if (wait < 0) continue;
        pen.fillRect(x(rank.events[i + 3] + wait), y, x(rank.events[i + 4] - wait), Math.max(height - 1, 0.5));
      }
    });
    pen.globalAlpha = 0.6;
    pen.fillStyle = colors.card;
    const from = x(this.view[0]), to = x(this.view[1]);
    pen.fillRect(0, 0, from, 40);
    pen.fillRect(to, 0, width - to, 40);
    pen.globalAlpha = 1;
    pen.strokeStyle = colors.accent;
    pen.lineWidth = 2;
    pen.strokeRect(Math.max(from, 1), 1, Math.max(Math.min(to, width - 1) - Math.max(from, 1), 2), 38);
  }
}

function makeHatch(color) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const pen = tile.getContext("2d");
  pen.strokeStyle = color;
  pen.globalAlpha = 0.5;
  pen.lineWidth = 1.2;
  pen.beginPath();
  for (const shift of [-6, 0, 6]) {
    pen.moveTo(shift, 6);
    pen.lineTo(shift + 6, 0);
  }
  pen.stroke();
  return pen.createPattern(tile, "repeat");
}

function niceTick(least) {
  const size = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * size).find((tick) => tick >= least);
}

// A time in the unit that suits the distance of ticks.
function sayMicros(time, tick = time) {
  const [size, unit] = tick >= 1e5 ? [1e6, "s"] : tick >= 100 ? [1e3, "ms"] : [1, "µs"];
  const digits = Math.max(0, -Math.floor(Math.log10(Math.max(Math.abs(tick), 1e-3) / size) + 1e-9));
  return `${(time / size).toFixed(Math.min(digits, 3))} ${unit}`;
}
