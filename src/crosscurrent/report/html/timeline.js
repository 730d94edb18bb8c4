"use strict";
// Draws the timeline of all lanes. The data stands in the page, as numbers; see timeline.py.
(() => {
  const holder = document.getElementById("timeline-data");
  if (!holder) return;
  const data = JSON.parse(holder.textContent);
  const canvas = document.getElementById("timeline");
  const chosen = document.getElementById("chosen");
  const context = canvas.getContext("2d");
  const [LANE, START, STOP, INDEX, LAST, NAME, PLACE, WAIT] = [0, 1, 2, 3, 4, 5, 6, 7];
  const TOP = 26, LABEL = 18, BAR = 24, STEP = LABEL + BAR + 12;
  const byLane = data.lanes.map(() => []);
  data.slices.forEach((slice, i) => byLane[slice[LANE]].push(i));
  const racing = new Map();
  for (const [first, second, finding] of data.races) {
    if (!racing.has(first)) racing.set(first, finding);
    if (!racing.has(second)) racing.set(second, finding);
  }
  let inOrder = false;
  let view = [0, 1];
  let selected = -1;
  let colors = {};
  let size = [0, 0];
  let scale = 0;

  const begin = (slice) => (inOrder ? slice[INDEX] : slice[START]);
  const end = (slice) => (inOrder ? slice[LAST] + 1 : slice[STOP]);
  const extent = () => {
    let low = Infinity, high = -Infinity;
    for (const slice of data.slices) {
      low = Math.min(low, begin(slice));
      high = Math.max(high, end(slice));
    }
    const margin = Math.max((high - low) * 0.01, 1);
    return [low - margin, high + margin];
  };
  const x = (value) => ((value - view[0]) / (view[1] - view[0])) * size[0];
  const valueAt = (pixel) => view[0] + (pixel / size[0]) * (view[1] - view[0]);
  const top = (lane) => TOP + lane * STEP + LABEL;

  const readColors = () => {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["text", "muted", "line", "bar", "bar-2", "wait", "bad", "accent", "panel", "bad-text"])
      colors[name] = style.getPropertyValue("--" + name).trim();
  };

  const resize = () => {
    const ratio = window.devicePixelRatio || 1;
    const width = canvas.parentElement.clientWidth;
    if (width === size[0] && ratio === scale) return;  // only our own height changed
    scale = ratio;
    const height = TOP + data.lanes.length * STEP + 6;
    canvas.style.height = height + "px";
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    size = [width, height];
    draw();
  };

  const asTime = (nanoseconds) => {
    const units = [["s", 1e9], ["ms", 1e6], ["us", 1e3], ["ns", 1]];
    for (const [unit, worth] of units)
      if (Math.abs(nanoseconds) >= worth) return +(nanoseconds / worth).toPrecision(4) + " " + unit;
    return "0";
  };

  const drawAxis = () => {
    const span = view[1] - view[0];
    const rough = span / Math.max(2, size[0] / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = Math.max(inOrder ? 1 : 0, [1, 2, 5, 10].find((factor) => factor * power >= rough) * power);
    context.fillStyle = colors.muted;
    context.strokeStyle = colors.line;
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "left";
    context.lineWidth = 1;
    for (let tick = Math.ceil(view[0] / step) * step; tick < view[1]; tick += step) {
      const at = Math.round(x(tick)) + 0.5;
      context.beginPath();
      context.moveTo(at, TOP - 6);
      context.lineTo(at, size[1]);
      context.stroke();
      context.fillText(inOrder ? "#" + tick : asTime(tick), at + 3, 13);
    }
  };

  const drawLane = (lane) => {
    const y = top(lane);
    let painted = -1;
    context.font = "11px ui-monospace, monospace";
    context.textAlign = "left";
    const marked = [];
    byLane[lane].forEach((i, n) => {
      const slice = data.slices[i];
      const left = x(begin(slice)), right = x(end(slice));
      if (right < 0 || left > size[0]) return;
      if (racing.has(i) || i === selected) return void marked.push(i);
      const width = Math.max(right - left - (right - left > 3 ? 1 : 0), 1);
      if (left + width < painted) return;  // lies in a pixel that is painted already
      painted = Math.floor(left + width);
      context.fillStyle = slice[WAIT] ? colors.wait : n % 2 ? colors.bar : colors["bar-2"];
      context.fillRect(left, y, width, BAR);
      label(slice, left, width, y, colors.text);
    });
    for (const i of marked) {
      const slice = data.slices[i];
      const left = x(begin(slice)), width = Math.max(x(end(slice)) - left, 3);
      context.fillStyle = racing.has(i) ? colors.bad : slice[WAIT] ? colors.wait : colors.bar;
      context.fillRect(left, y, width, BAR);
      if (i === selected) {
        context.strokeStyle = colors.text;
        context.lineWidth = 2;
        context.strokeRect(left - 1, y - 1, width + 2, BAR + 2);
      }
      label(slice, left, width, y, racing.has(i) ? colors["bad-text"] : colors.text);
    }
  };

  const label = (slice, left, width, y, color) => {
    const from = Math.max(left, 0) + 4;
    const room = Math.floor((Math.min(left + width, size[0]) - from) / 6.7);
    if (room < 3) return;
    const name = data.names[slice[NAME]];
    context.fillStyle = color;
    context.fillText(name.length > room ? name.slice(0, room - 1) + "\u2026" : name, from, y + 16);
  };

  // A lane's name stands in its own stripe above its slices, over a patch that no arrow crosses.
  const drawNames = () => {
    context.font = "600 12px system-ui, sans-serif";
    context.textAlign = "left";
    data.lanes.forEach((name, lane) => {
      context.fillStyle = colors.panel;
      context.fillRect(0, top(lane) - LABEL + 1, context.measureText(name).width + 12, LABEL - 3);
      context.fillStyle = colors.text;
      context.fillText(name, 6, top(lane) - 6);
    });
  };

  const curve = (first, second, from, to, color, width, dashes) => {
    const a = data.slices[first], b = data.slices[second];
    const x1 = x(from), x2 = x(to);
    if (Math.max(x1, x2) < -20 || Math.min(x1, x2) > size[0] + 20) return false;
    const down = b[LANE] > a[LANE];
    const y1 = top(a[LANE]) + (down ? BAR : 0), y2 = top(b[LANE]) + (down ? 0 : BAR);
    context.strokeStyle = context.fillStyle = color;
    context.lineWidth = width;
    context.setLineDash(dashes);
    context.beginPath();
    context.moveTo(x1, y1);
    const middle = (y1 + y2) / 2;
    context.bezierCurveTo(x1, middle, x2, middle, x2, y2);
    context.stroke();
    context.setLineDash([]);
    const back = down ? -7 : 7;
    context.beginPath();
    context.moveTo(x2, y2);
    context.lineTo(x2 - 3.5, y2 + back);
    context.lineTo(x2 + 3.5, y2 + back);
    context.fill();
    return true;
  };

  const drawArrows = () => {
    const ends = (arrow) => (inOrder ? [arrow[6], arrow[7]] : [arrow[4], arrow[5]]);
    const near = (arrow) => arrow[0] === selected || arrow[1] === selected;
    const visible = data.arrows.filter((arrow) => {
      const [from, to] = ends(arrow);
      return Math.max(from, to) >= view[0] && Math.min(from, to) <= view[1];
    });
    // More than this on a screen is a cloud; then some of them stand for all.
    const every = Math.ceil(visible.length / Math.max(60, size[0] / 4));
    visible.forEach((arrow, n) => {
      if (n % every && !near(arrow)) return;
      const color = near(arrow) ? colors.text : colors.accent;
      curve(arrow[0], arrow[1], ...ends(arrow), color, near(arrow) ? 2 : 1, []);
    });
    for (const [first, second] of data.races)
      curve(first, second, end(data.slices[first]), begin(data.slices[second]), colors.bad, 2, [5, 4]);
  };

  let pending = false;
  const draw = () => {
    if (pending) return;
    pending = true;
    requestAnimationFrame(() => {
      pending = false;
      context.clearRect(0, 0, size[0], size[1]);
      drawAxis();
      data.lanes.forEach((_, lane) => drawLane(lane));
      drawArrows();
      drawNames();
      canvas.dataset.drawn = String(1 + Number(canvas.dataset.drawn || 0));
    });
  };

  const show = (low, high) => {
    const [from, to] = extent();
    const whole = to - from;
    let span = Math.min(Math.max(high - low, inOrder ? 3 : 20), whole);
    let start = Math.min(Math.max((low + high - span) / 2, from), to - span);
    view = [start, start + span];
    draw();
  };
  const zoom = (factor, pixel) => {
    const center = valueAt(pixel);
    show(center - (center - view[0]) * factor, center + (view[1] - center) * factor);
  };
  const fit = () => show(...extent());

  const describe = (i) => {
    selected = i;
    if (i < 0) {
      chosen.textContent = "Nothing chosen.";
      return draw();
    }
    const slice = data.slices[i];
    const parts = [data.names[slice[NAME]] + " on " + data.lanes[slice[LANE]]];
    if (data.places[slice[PLACE]]) parts.push(data.places[slice[PLACE]]);
    parts.push(asTime(slice[STOP] - slice[START]) + " from " + asTime(slice[START]) + " (model)");
    parts.push("record " + slice[INDEX] + (slice[LAST] > slice[INDEX] ? " to " + slice[LAST] : ""));
    if (racing.has(i)) parts.push("races: finding " + (racing.get(i) + 1));
    chosen.textContent = parts.join(" \u00b7 ");
    draw();
  };
  const find = (px, py) => {
    const lane = Math.floor((py - TOP) / STEP);
    if (lane < 0 || lane >= data.lanes.length) return -1;
    let best = -1, distance = 8;
    for (const i of byLane[lane]) {
      const slice = data.slices[i];
      const away = Math.max(x(begin(slice)) - px, px - x(end(slice)), 0);
      if (away < distance || (away === distance && racing.has(i))) [best, distance] = [i, away];
    }
    return best;
  };

  const pointers = new Map();
  let moved = 0;
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, event.offsetX);
    moved = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!pointers.has(event.pointerId)) return;
    const before = [...pointers.values()];
    const delta = event.offsetX - pointers.get(event.pointerId);
    pointers.set(event.pointerId, event.offsetX);
    moved += Math.abs(delta);
    if (pointers.size === 1) {
      const shift = (delta / size[0]) * (view[1] - view[0]);
      show(view[0] - shift, view[1] - shift);
    } else if (pointers.size === 2) {
      const after = [...pointers.values()];
      const [was, is] = [Math.abs(before[0] - before[1]), Math.abs(after[0] - after[1])];
      if (was > 4 && is > 4) zoom(was / is, (after[0] + after[1]) / 2);
    }
  });
  const lift = (event) => {
    const single = pointers.size === 1;
    pointers.delete(event.pointerId);
    if (event.type === "pointerup" && single && moved < 5) describe(find(event.offsetX, event.offsetY));
  };
  canvas.addEventListener("pointerup", lift);
  canvas.addEventListener("pointercancel", lift);
  canvas.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.01), event.offsetX);
    } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      const shift = (event.deltaX / size[0]) * (view[1] - view[0]);
      show(view[0] + shift, view[1] + shift);
    }
  }, { passive: false });
  const middle = () => (selected >= 0 ? x((begin(data.slices[selected]) + end(data.slices[selected])) / 2) : size[0] / 2);
  const inView = (pixel) => Math.min(Math.max(pixel, 0), size[0]);
  const actions = {
    in: () => zoom(0.5, inView(middle())),
    out: () => zoom(2, inView(middle())),
    fit,
    axis: (button) => {
      inOrder = !inOrder;
      button.setAttribute("aria-pressed", String(inOrder));
      fit();
    },
  };
  for (const button of document.querySelectorAll("[data-do]"))
    button.addEventListener("click", () => actions[button.dataset.do](button));
  canvas.addEventListener("keydown", (event) => {
    const span = view[1] - view[0];
    const keys = {
      "+": () => actions.in(), "=": () => actions.in(), "-": () => actions.out(), 0: fit,
      ArrowLeft: () => show(view[0] - span / 5, view[1] - span / 5),
      ArrowRight: () => show(view[0] + span / 5, view[1] + span / 5),
    };
    if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  for (const link of document.querySelectorAll("[data-finding]"))
    link.addEventListener("click", () => {
      const race = data.races.find(([, , finding]) => finding === Number(link.dataset.finding));
      if (!race) return;
      const [a, b] = [data.slices[race[0]], data.slices[race[1]]];
      const low = Math.min(begin(a), begin(b)), high = Math.max(end(a), end(b));
      describe(race[0]);
      show(low - (high - low), high + (high - low));
      document.getElementById("timeline-section").scrollIntoView();
    });

  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", () => { readColors(); draw(); });
  new ResizeObserver(resize).observe(canvas.parentElement);
  readColors();
  view = extent();
  resize();
})();
