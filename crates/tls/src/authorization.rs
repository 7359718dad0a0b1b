//! Rules on which clients are let in, by the names in their certificates.

use std::fmt;

/// A rule's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Permission {
    /// The client is let in.
    Allow,
    /// The client is sent away.
    Deny,
}

/// A rule: clients whose name matches get its permission.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    pattern: Pattern,
    permission: Permission,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Pattern {
    Exact(String),
    Glob(String),
}

impl Rule {
    /// A rule on one name.
    pub fn exact(name: impl Into<String>, permission: Permission) -> Self {
        Self { pattern: Pattern::Exact(name.into()), permission }
    }

    /// A rule on names that match a pattern, in which `*` stands for any characters and `?` for one.
    pub fn glob(pattern: impl Into<String>, permission: Permission) -> Self {
        Self { pattern: Pattern::Glob(pattern.into()), permission }
    }

    fn matches(&self, name: &str) -> bool {
        match &self.pattern {
            Pattern::Exact(pattern) => pattern == name,
            Pattern::Glob(pattern) => glob_matches(pattern, name),
        }
    }
}

/// Rules in their order: the first that matches decides. Resembles QEMU's `authz-list`.
#[derive(Clone, PartialEq, Eq)]
pub struct Authorization {
    rules: Vec<Rule>,
    otherwise: Permission,
}

impl fmt::Debug for Authorization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.rules).entry(&self.otherwise).finish()
    }
}

impl Authorization {
    /// Rules, and the permission on a name that none of them matches.
    pub fn new(rules: Vec<Rule>, otherwise: Permission) -> Self {
        Self { rules, otherwise }
    }

    /// The permission on a client whose certificate has this subject, as [`Session::client_name`](crate::Session::client_name)
    /// writes it.
    pub fn permission(&self, name: &str) -> Permission {
        self.rules.iter().find(|rule| rule.matches(name)).map_or(self.otherwise, |rule| rule.permission)
    }
}

/// Matches in a time of at most pattern times text: of the last `*` alone it tries more.
fn glob_matches(pattern: &str, text: &str) -> bool {
    let (pattern, text): (Vec<char>, Vec<char>) = (pattern.chars().collect(), text.chars().collect());
    let (mut at, mut done) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while done < text.len() {
        match pattern.get(at) {
            Some('*') => {
                star = Some((at + 1, done));
                at += 1;
            }
            Some(character) if *character == '?' || *character == text[done] => {
                at += 1;
                done += 1;
            }
            _ => {
                let Some((after, begun)) = star else { return false };
                star = Some((after, begun + 1));
                (at, done) = (after, begun + 1);
            }
        }
    }
    pattern[at..].iter().all(|character| *character == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_have_stars_and_question_marks() {
        for (pattern, text, matches) in [
            ("*", "", true),
            ("C=GB*", "C=GB,CN=a", true),
            ("*CN=a", "C=GB,CN=a", true),
            ("*CN=a", "C=GB,CN=ab", false),
            ("*,O=?oo,*", "C=GB,O=Foo,CN=a", true),
            ("a*b*c", "abbbxbc", true),
            ("a*b*c", "abbbxb", false),
            ("?", "", false),
            ("[a]", "a", false),
            ("*?é", "xé", true),
        ] {
            assert_eq!(glob_matches(pattern, text), matches, "{pattern} {text}");
        }
        assert!(!glob_matches(&"*a".repeat(200), &"a".repeat(5000).replace('a', "b")));
    }

    #[test]
    fn the_first_rule_that_matches_decides() {
        let rules = vec![Rule::exact("CN=a", Permission::Deny), Rule::glob("CN=*", Permission::Allow)];
        let authorization = Authorization::new(rules, Permission::Deny);
        for (name, permission) in
            [("CN=a", Permission::Deny), ("CN=b", Permission::Allow), ("O=c", Permission::Deny)]
        {
            assert_eq!(authorization.permission(name), permission);
        }
        assert_eq!(Authorization::new(Vec::new(), Permission::Allow).permission("x"), Permission::Allow);
    }
}
