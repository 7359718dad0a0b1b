//! Ratios as bars, in SVG.

use crate::Outcome;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// How many times better than the other side.
pub(super) struct Bar {
    pub(super) name: String,
    pub(super) value: f64,
    /// The line through the bar's end.
    pub(super) low: f64,
    pub(super) high: f64,
}

/// Pixels that a bar takes with its name.
const EACH: u32 = 44;
const WIDTH: u32 = 460;
const LEFT: i32 = 8;

/// The bars, one below the other. Names stand above them, so that the plot is narrow enough for a telephone.
pub(super) fn drawn(bars: &[Bar]) -> Outcome<String> {
    let mut svg = String::new();
    draw(&mut svg, bars).map_err(|e| e.to_string())?;
    Ok(svg)
}

fn draw(svg: &mut String, bars: &[Bar]) -> Result<(), Box<dyn std::error::Error>> {
    let height = bars.len() as u32 * EACH + 40;
    let right = bars.iter().map(|bar| bar.high).fold(2.0, f64::max) * 1.05;
    let (good, bad) = (RGBColor(46, 125, 80), RGBColor(192, 57, 43));
    let area = SVGBackend::with_string(svg, (WIDTH, height)).into_drawing_area();
    area.fill(&WHITE)?;
    let scale = |x: f64| LEFT + (x / right * f64::from(WIDTH as i32 - 2 * LEFT)) as i32;
    let words = ("sans-serif", 16).into_font();
    for (bar, top) in bars.iter().zip((20..).step_by(EACH as usize)) {
        let style = TextStyle::from(words.clone()).pos(Pos::new(HPos::Left, VPos::Bottom));
        area.draw_text(&bar.name, &style, (LEFT, top))?;
        let color = if bar.value >= 1.0 { good } else { bad };
        area.draw(&Rectangle::new([(LEFT, top + 2), (scale(bar.value), top + 18)], color.filled()))?;
        let middle = top + 10;
        area.draw(&PathElement::new([(scale(bar.low), middle), (scale(bar.high), middle)], BLACK))?;
        let style = TextStyle::from(words.clone()).pos(Pos::new(HPos::Left, VPos::Center));
        let label = format!("{:.2}x", bar.value);
        let after = scale(bar.high) + 6;
        let (at, style) =
            if after > WIDTH as i32 - 50 { (LEFT + 4, style.color(&WHITE)) } else { (after, style) };
        area.draw_text(&label, &style, (at, middle))?;
    }
    let bottom = height as i32 - 18;
    area.draw(&PathElement::new([(scale(1.0), 0), (scale(1.0), bottom)], BLACK.mix(0.5)))?;
    let style = TextStyle::from(words).pos(Pos::new(HPos::Center, VPos::Top));
    area.draw_text("1x", &style, (scale(1.0), bottom))?;
    area.present()?;
    Ok(())
}
