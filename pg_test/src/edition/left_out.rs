//! The tests that do not apply to the lite edition, with the reasons: `left_out.txt`.

use std::sync::LazyLock;

/// A group (`file::`) or a test (`file::name`), with the reason.
pub static LEFT_OUT: LazyLock<Vec<(&str, &str)>> = LazyLock::new(|| {
    let lines = include_str!("left_out.txt").lines();
    lines.map(|line| line.split_once(" | ").expect("a line is `test | why`")).collect()
});

/// The reason why a test does not apply to the lite edition, by its full name; `None` if it does.
pub fn reason(test: &str) -> Option<&'static str> {
    LEFT_OUT.iter().find(|(what, _)| is_meant(what, test)).map(|(_, why)| *why)
}

/// The entries of the list that match none of these tests, for example because these were renamed or deleted.
pub fn without_a_test(tests: &[String]) -> Vec<&'static str> {
    let names = LEFT_OUT.iter().map(|(what, _)| *what);
    names.filter(|what| !tests.iter().any(|test| is_meant(what, test))).collect()
}

fn is_meant(what: &str, test: &str) -> bool {
    let (what, test) = (format!("::{what}"), format!("::{test}"));
    if what.ends_with("::") { test.contains(&what) } else { test.ends_with(&what) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_and_a_test_are_known_by_the_end_of_their_names() {
        assert!(reason("leases::slots::anything").is_some());
        assert!(reason("a::leases::slots::anything").is_some());
        assert!(reason("no_slots::anything").is_none());
        assert!(reason("leases::a_lease_is_held_by_one_at_a_time").is_none());
        let shared = "leases::shared::one".to_owned();
        assert!(!without_a_test(std::slice::from_ref(&shared)).contains(&"leases::shared::"));
        assert!(without_a_test(&[shared]).contains(&"leases::slots::"));
    }
}
