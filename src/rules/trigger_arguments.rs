//! What the arguments of a trigger that calls `fenced` stand for: which place has which meaning, and what is meant
//! where one is left out or empty. What the words in them mean is for the trigger to say.

/// As many as a trigger may have.
pub const MOST: usize = 5;

/// `fenced(fence_column, mode, lease, 'verify', 'unfenced insert')`, in the database's encoding.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TriggerArguments<'a> {
    /// The fence column's name.
    pub fence_column: &'a [u8],
    /// How tokens are compared, and who fills the fence column.
    pub mode: &'a [u8],
    /// The template of the leases that guard the rows.
    pub lease: Option<&'a [u8]>,
    /// The trigger looks again behind all others.
    pub verify: Option<&'a [u8]>,
    /// A managed row may be created without its lease.
    pub unfenced_insert: Option<&'a [u8]>,
}

impl<'a> TriggerArguments<'a> {
    /// Reads them in their order. Those behind the last that is known are for the caller to refuse.
    pub fn new(mut given: impl Iterator<Item = &'a [u8]>) -> Self {
        let mut next = || given.next().filter(|argument| !argument.is_empty());
        TriggerArguments {
            fence_column: next().unwrap_or(b"fence"),
            mode: next().unwrap_or(b"strict"),
            lease: next(),
            verify: next(),
            unfenced_insert: next(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_or_empty_has_its_default() {
        let read = |given: &[&'static str]| {
            TriggerArguments::new(given.iter().copied().map(str::as_bytes))
        };
        let none = TriggerArguments {
            fence_column: b"fence",
            mode: b"strict",
            lease: None,
            verify: None,
            unfenced_insert: None,
        };
        assert_eq!(read(&[]), none);
        assert_eq!(read(&["", "", "", "", ""]), none);
        let all = read(&["token", "managed", "order:{id}", "verify", "unfenced insert"]);
        assert_eq!((all.fence_column, all.mode), (&b"token"[..], &b"managed"[..]));
        assert_eq!(all.lease, Some(&b"order:{id}"[..]));
        assert_eq!(all.verify, Some(&b"verify"[..]));
        assert_eq!(all.unfenced_insert, Some(&b"unfenced insert"[..]));
        assert_eq!(read(&["", "", "", "", "unfenced insert"]).verify, None);
    }
}
