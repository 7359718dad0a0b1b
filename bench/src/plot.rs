//! A plot in SVG: ratios as bars on a logarithmic axis.

use std::fmt::Write;

/// How many times better than the other side; a bar begins at 1.
pub(crate) struct Bar {
    pub(crate) name: String,
    pub(crate) value: f64,
    /// The ends of the line across the bar's end.
    pub(crate) low: f64,
    pub(crate) high: f64,
    /// Beside the bar.
    pub(crate) label: String,
}

/// Pixels: narrow enough for a telephone, with names above their bars.
const WIDTH: f64 = 400.0;
const LEFT: f64 = 10.0;
/// Place for the number behind the longest bar.
const RIGHT: f64 = 62.0;
const EACH: f64 = 46.0;
const TOP: f64 = 30.0;

/// The bars, one below the other.
pub(crate) fn drawn(title: &str, bars: &[Bar]) -> String {
    let least = bars.iter().map(|bar| bar.low.min(bar.value)).fold(0.8, f64::min);
    let most = bars.iter().map(|bar| bar.high.max(bar.value)).fold(2.0, f64::max);
    let scale = |x: f64| LEFT + (x / least).ln() / (most / least).ln() * (WIDTH - LEFT - RIGHT);
    let bottom = TOP + bars.len() as f64 * EACH;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" viewBox=\"0 0 {WIDTH} {}\" font-family=\"sans-serif\" font-size=\"15\" \
         role=\"img\" aria-label=\"{title}\">\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
         <text x=\"{LEFT}\" y=\"18\" font-weight=\"bold\">{title}</text>\n",
        bottom + 24.0
    );
    for tick in
        [0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0].into_iter().filter(|t| (least..=most).contains(t))
    {
        let (x, color) = (scale(tick), if (tick - 1.0).abs() < 0.01 { "#000" } else { "#ccc" });
        let _ = writeln!(
            svg,
            "<path d=\"M{x:.1} {TOP}V{bottom}\" stroke=\"{color}\"/><text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\" \
             font-size=\"13\">{tick}x</text>",
            bottom + 16.0
        );
    }
    for (place, Bar { name, value, low, high, label }) in bars.iter().enumerate() {
        let top = TOP + place as f64 * EACH;
        let (one, end) = (scale(1.0), scale(*value));
        let color = if *value >= 1.0 { "#2e7d50" } else { "#c0392b" };
        let _ = writeln!(
            svg,
            "<text x=\"{LEFT}\" y=\"{}\" stroke=\"#fff\" stroke-width=\"4\" paint-order=\"stroke\">{name}</text>\
             <rect x=\"{:.1}\" y=\"{}\" width=\"{:.1}\" height=\"16\" fill=\"{color}\"/>\
             <path d=\"M{:.1} {y}H{:.1}\" stroke=\"#000\"/><text x=\"{:.1}\" y=\"{}\">{label}</text>",
            top + 17.0,
            one.min(end),
            top + 22.0,
            (end - one).abs().max(1.0),
            scale(*low),
            scale(*high),
            scale(high.max(*value)).max(one) + 6.0,
            top + 35.0,
            y = top + 30.0,
        );
    }
    svg + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_ends_left_of_one_if_it_is_worse_and_all_lie_within_the_plot() {
        let bar = |value: f64| Bar {
            name: "n".into(),
            value,
            low: value * 0.9,
            high: value * 1.1,
            label: format!("{value:.2}x"),
        };
        let svg = drawn("t", &[bar(0.3), bar(1.5), bar(40.0)]);
        let widths =
            svg.split(" width=\"").skip(3).filter_map(|rest| rest.split('"').next()?.parse::<f64>().ok());
        assert!(widths.clone().count() == 3 && widths.into_iter().all(|width| width > 20.0 && width < WIDTH));
        assert!(svg.contains("0.30x") && svg.contains(">5x<") && !svg.contains(">50x<"), "{svg}");
    }
}
