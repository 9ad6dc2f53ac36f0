// What the page of `hftrainer plot --html` does. `plot.py` sets `layouts`, pairs of a window's least width and its layout.
const plot = document.getElementById("{plot_id}"), axis = plot.layout.yaxis2;
const [box, select] = ["input", "select"].map(name => document.querySelector(name));

// As many columns as are readable in the window.
let layout = layouts[0][1];
onresize = () => {
    const fitting = layouts.find(([width]) => innerWidth >= width)[1];
    if (fitting !== layout) Plotly.relayout(plot, layout = fitting);
};
onresize();

// The scale of the losses, whose panel is the first.
const first = {"yaxis2.type": axis.type, "yaxis2.range": axis.range, "yaxis2.title.text": axis.title.text};
const [type, title] = axis.type === "log" ? ["linear", "Loss"] : ["log", "Loss (log scale)"];
const other = {"yaxis2.type": type, "yaxis2.title.text": title, "yaxis2.autorange": true};
if (box) box.onchange = () => Plotly.relayout(plot, box.checked === box.defaultChecked ? first : other);

// The means: `meta` names the choices at which a curve is shown. Runs hidden by the legend remain hidden.
if (select) select.onchange = () => {
    const hidden = new Set(plot.data.filter(each => each.visible === "legendonly").map(each => each.legendgroup));
    const isShown = each => !each.meta || each.meta.includes(select.value);
    const visible = plot.data.map(each => isShown(each) && (hidden.has(each.legendgroup) ? "legendonly" : true));
    Plotly.restyle(plot, {visible});
};
