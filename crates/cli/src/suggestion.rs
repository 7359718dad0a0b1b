//! Names that were probably meant, for messages about unknown ones.

use zebu_disks::printable;

/// Names that a message lists.
const MOST_LISTED: usize = 8;
/// Similarity (0 to 1, by Jaro) from which a name may have been meant.
const SIMILAR: f64 = 0.7;

/// The end of a message about the unknown `name`: the name of `known` that is most like it, else all of them where they are few.
/// `kind` is the plural of what they name.
pub(crate) fn meant<'a>(name: &str, kind: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let known: Vec<&str> = known.into_iter().collect();
    if let Some(similar) = most_similar(name, &known) {
        return format!(" (did you mean '{}'?)", printable(similar));
    }
    match known.len() {
        0 => format!(" (there are no {kind})"),
        1..=MOST_LISTED => {
            let names: Vec<String> = known.iter().map(|name| format!("'{}'", printable(name))).collect();
            format!(" (there are {})", names.join(", "))
        }
        _ => String::new(),
    }
}

/// The name that is most like `name`, if any is like it at all.
pub(crate) fn most_similar<'a>(name: &str, known: &[&'a str]) -> Option<&'a str> {
    let rated = known.iter().map(|candidate| (strsim::jaro(name, candidate), *candidate));
    // Of short names, one letter makes much.
    let is_one_slip =
        |candidate: &str| candidate.chars().count() > 2 && strsim::osa_distance(name, candidate) == 1;
    let likely = rated.filter(|(similarity, candidate)| *similarity > SIMILAR || is_one_slip(candidate));
    // Of names that are equally like it, the first.
    likely.reduce(|best, other| if other.0 > best.0 { other } else { best }).map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_similar_name_is_suggested() {
        assert_eq!(meant("befor", "snapshots", ["before", "after"]), " (did you mean 'before'?)");
        assert_eq!(
            meant("clster_size", "options", ["cluster_size", "size"]),
            " (did you mean 'cluster_size'?)"
        );
    }

    #[test]
    fn a_slip_in_a_short_name_is_seen() {
        assert_eq!(most_similar("wbe", &["db", "web"]), Some("web"));
        assert_eq!(most_similar("db", &["dx", "web"]), None);
        assert_eq!(most_similar("vm1", &["vm01", "vm10", "vm19"]), Some("vm01"));
    }

    #[test]
    fn few_names_are_listed_where_none_is_similar() {
        assert_eq!(meant("x", "snapshots", ["before", "after"]), " (there are 'before', 'after')");
        assert_eq!(meant("x", "snapshots", []), " (there are no snapshots)");
        assert_eq!(meant("x", "snapshots", ["before"; 9]), "");
    }
}
