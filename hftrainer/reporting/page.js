// What the page of `hftrainer plot --html` does. `page.py` sets `shown`, the horizontal axis at first; `others`: each other axis
// → its data and layout; `layouts`: axis → pairs of a window's least width and its layout; `scales`: axis → scale of losses
// → axis of a panel → its settings; `parts`: smoothing → in how many parts of a curve it takes means; `level`: the first;
// `notes`: axis → text.
const plot = document.getElementById("{plot_id}");
const [scale, smoothing, axis, smoothed] = ["scale", "smoothing", "axis", "smoothed"].map(id => document.getElementById(id));
const charts = {[shown]: {data: plot.data, layout: structuredClone(plot.layout)}, ...others};
let x = shown;

// On a phone, plotly would cut the entries of runs, which are in no legend of a panel.
const wrap = ({name, legend}) => legend || innerWidth >= 600 || !name ? name : name.match(/.{1,42}( |$)|[^ ]+ ?/g).join("<br>");
const names = () => charts[x].data.map(wrap);

// As many columns as are readable in the window, as high as it. `legend.y` is the share of the height of the panels.
const fitting = () => {
    const layout = {...layouts[x].find(([width]) => innerWidth >= width)[1]};
    const lines = names().filter((_, index) => charts[x].data[index].showlegend !== false).join("").split("<br>").length - 1;
    layout.height += 14 * lines;
    const top = layout["margin.t"] += 14 * lines;
    const height = Math.max(layout.height, innerHeight - plot.getBoundingClientRect().top - scrollY - 12);
    return {...layout, height, "legend.y": 1 + (layout["legend.y"] - 1) * (layout.height - top) / (height - top)};
};
onresize = () => Plotly.update(plot, {name: names()}, fitting());

// The scale of the losses. In any but a panel's own no value is above it, so no mark says so.
const setScale = () => {
    const axes = Object.entries(scales[x][scale.value]);
    const others = axes.filter(([name, {type}]) => type !== scales[x].automatic[name].type).map(([name]) => `y${1000 + +name.slice(5)}`);
    const isPeak = each => each.marker?.symbol === "triangle-up";
    const isNoPeak = each => isPeak(each) && others.includes(each.yaxis);
    const settings = axes.flatMap(([name, values]) => Object.entries(values).map(([key, value]) => [`${name}.${key}`, value]));
    const opacity = plot.data.map(each => isNoPeak(each) ? 0 : each.opacity === 0 ? 1 : each.opacity);
    const showlegend = plot.data.map(each => isPeak(each) ? !isNoPeak(each) : each.showlegend);
    Plotly.update(plot, {opacity, showlegend}, Object.fromEntries(settings));
};

// The means: `meta` names the choices at which a curve is shown. Runs hidden by the legend remain hidden.
const findHidden = () => new Set(plot.data.filter(each => each.visible === "legendonly").map(each => each.legendgroup));
const isShown = each => !each.meta || each.meta.includes(smoothing.value);
const choose = (data, hidden) => data.map(each => isShown(each) && (hidden.has(each.legendgroup) ? "legendonly" : true));

// Without the runs that the legend hides, the panels have the range of the others.
let hiddenCount = 0;
const fitToShown = () => {
    const traces = plot.data.filter(each => each.visible !== "legendonly" && each.visible !== false);
    const axes = Object.entries({...charts[x].layout, ...scales[x][scale.value]});
    const ranges = axes.filter(([name]) => /^yaxis\d+$/.test(name) && +name.slice(5) < 1000).map(([name, {range, type}]) => {
        const values = traces.filter(each => each.yaxis === name.replace("axis", "")).flatMap(each => each.y);
        const places = values.filter(y => y !== null && (type !== "log" || y > 0))
            .map(y => type === "log" ? Math.log10(y) : y).filter(y => y >= range[0] && y <= range[1]);
        const [low, high] = places.reduce(([low, high], y) => [Math.min(low, y), Math.max(high, y)], [Infinity, -Infinity]);
        const margin = (high - low) / 20;
        return [`${name}.range`, hiddenCount && high > low ? [range[0] && low - margin, high + margin] : [...range]];
    });
    const last = Math.max(...traces.filter(each => +each.yaxis.slice(1) < 1000).flatMap(each => each.x));
    const [first, end] = charts[x].layout.xaxis2.range;
    const horizontal = hiddenCount && last > 0 ? [Math.max(first, -last / 60), Math.min(end, 1.05 * last)] : [first, end];
    Plotly.relayout(plot, {...Object.fromEntries(ranges), "xaxis2.range": horizontal});
};

// The curves over another axis, with the other choices as they are.
const setAxis = async () => {
    const hidden = findHidden();
    x = axis.value;
    const visible = choose(charts[x].data, hidden), layout = structuredClone(charts[x].layout);
    await Plotly.react(plot, charts[x].data.map((each, index) => ({...each, visible: visible[index]})), layout);
    await onresize();
    document.getElementById("notes").textContent = notes[x];
    setScale();
    if (hiddenCount) fitToShown();
};

const explainSmoothing = () => smoothed.textContent = smoothing.value in parts
    ? `faint: logged values; strong: centred mean without spikes, over 1/${parts[smoothing.value]} of the curve, at least a few values` : "";
const setSmoothing = () => {
    explainSmoothing();
    Plotly.restyle(plot, {visible: choose(plot.data, findHidden())});
};

// Only the choices that the page has.
scale.parentNode.hidden = !Object.keys(scales[shown].automatic).length;
axis.parentNode.hidden = axis.length < 2;
smoothing.parentNode.hidden = !parts.strong;
if (!parts.light) smoothing.remove(1);
smoothing.value = level;
explainSmoothing();
scale.onchange = () => {
    setScale();
    if (hiddenCount) fitToShown();
};
[smoothing.onchange, axis.onchange] = [setSmoothing, setAxis];
onresize();
plot.on("plotly_restyle", () => {
    if (hiddenCount === findHidden().size) return;
    hiddenCount = findHidden().size;
    fitToShown();
});
