//! `-l`: which internal snapshot is meant.

use crate::failure::Failure;
use zebu_disks::keyval::parse_keyval;

/// The id or name in `-l NAME`, `-l snapshot.name=NAME` or `-l snapshot.id=ID`.
pub(crate) fn snapshot_name(argument: &str) -> Result<String, Failure> {
    if !argument.starts_with("snapshot.") {
        return Ok(argument.to_owned());
    }
    let pairs = parse_keyval(argument)
        .map_err(|error| Failure::new(format!("Failed in parsing snapshot param '{argument}': {error}")))?;
    match pairs.as_slice() {
        [(key, value)] if key == "snapshot.name" || key == "snapshot.id" => Ok(value.clone()),
        [(key, _), ..] if key != "snapshot.name" && key != "snapshot.id" => Err(Failure::new(format!(
            "Failed in parsing snapshot param '{argument}': unknown parameter '{key}'"
        ))),
        _ => Err(Failure::new(format!(
            "Failed in parsing snapshot param '{argument}': give either snapshot.id or snapshot.name"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_given_plainly_or_as_parameters() {
        assert_eq!(snapshot_name("before update").unwrap(), "before update");
        assert_eq!(snapshot_name("snapshot.name=a,,b").unwrap(), "a,b");
        assert_eq!(snapshot_name("snapshot.id=3").unwrap(), "3");
    }

    #[test]
    fn other_parameters_are_refused_by_name() {
        let failure = snapshot_name("snapshot.date=1").unwrap_err();
        assert!(failure.message.unwrap().contains("'snapshot.date'"));
        assert!(snapshot_name("snapshot.id=1,snapshot.name=a").is_err());
    }
}
