//! A table in text.

/// Rows under a heading; the first column is aligned left, the others right.
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// With its heading.
    pub fn new<'a>(heading: impl IntoIterator<Item = &'a str>) -> Self {
        Self { rows: vec![heading.into_iter().map(String::from).collect()] }
    }

    /// Appends a row.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// The text.
    pub fn render(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            self.rows.iter().filter_map(|r| r.get(column)).map(|c| c.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut text = String::new();
        for (number, row) in self.rows.iter().enumerate() {
            let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, width))| {
                if column == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
            });
            text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
            text.push('\n');
            if number == 0 {
                let line = widths.iter().map(|w| "-".repeat(*w)).collect::<Vec<_>>().join("  ");
                text.push_str(&line);
                text.push('\n');
            }
        }
        text
    }
}

/// `1234567` as `1,234,567`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A figure in three digits, grouped: `71736` as `71,700`, `0.01234` as `0.0123`.
pub fn shown(value: f64) -> String {
    let digits = if value == 0.0 { 0 } else { value.abs().log10().floor() as i32 };
    let unit = 10f64.powi(digits - 2);
    let rounded = (value / unit).round() * unit;
    if rounded >= 100.0 {
        grouped(rounded as u64)
    } else {
        format!("{rounded:.*}", (2 - digits).max(0) as usize)
    }
}

/// `1234.5` as `1234`, `12.345` as `12.35`: four significant digits at most.
pub fn number(value: f64) -> String {
    let decimals = match value.abs() {
        v if v >= 1000.0 => 0,
        v if v >= 100.0 => 1,
        v if v >= 10.0 => 2,
        _ => 3,
    };
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_grouped() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(1000), "1,000");
        assert_eq!(grouped(1_234_567), "1,234,567");
    }

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(["step", "time"]);
        table.row(["convert".into(), "1.5 s".into()]);
        table.row(["x".into(), "10.25 s".into()]);
        assert_eq!(
            table.render(),
            "step        time\n-------  -------\nconvert    1.5 s\nx        10.25 s\n"
        );
    }

    #[test]
    fn three_digits() {
        let shown = [71736.0, 99999.0, 123.456, 9.996, 0.01234, 0.0].map(shown);
        assert_eq!(shown, ["71,700", "100,000", "123", "10.00", "0.0123", "0.00"]);
    }

    #[test]
    fn four_digits() {
        assert_eq!(
            [number(123456.7), number(123.456), number(12.345), number(0.01234)],
            ["123457", "123.5", "12.35", "0.012"]
        );
    }
}
