//! Which entry of a full list is overwritten by the next one, so that many entries of one owner do not displace those
//! of others.

use std::collections::HashMap;

/// An entry of the list.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// A number that grows with each entry.
    pub number: u64,
    /// The owner of the entry.
    pub owner: u32,
}

/// The index to overwrite next: a free one; or else the oldest entry of the owners with more than a quarter of the
/// list; or else the oldest entry. `None` if the list has length 0.
pub fn next_to_evict(places: &[Option<Entry>]) -> Option<usize> {
    if let Some(free) = places.iter().position(Option::is_none) {
        return Some(free);
    }
    let mut number_of: HashMap<u32, usize> = HashMap::new();
    for entry in places.iter().flatten() {
        *number_of.entry(entry.owner).or_default() += 1;
    }
    let has_too_many = |owner| 4 * number_of[&owner] > places.len();
    let all = places.iter().flatten().enumerate();
    all.min_by_key(|(_, entry)| (!has_too_many(entry.owner), entry.number)).map(|(n, _)| n)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds `count` entries of an owner.
    fn put(places: &mut [Option<Entry>], owner: u32, count: usize) {
        for _ in 0..count {
            let last = places.iter().flatten().map(|entry| entry.number).max().unwrap_or(0);
            let place = next_to_evict(places).expect("there are places");
            places[place] = Some(Entry { number: last + 1, owner });
        }
    }

    #[test]
    fn who_has_more_than_a_quarter_drives_out_its_own() {
        let mut places = [None; 16];
        // A single owner fills the whole list. Others then displace its entries, up to a quarter each; of two owners
        // with more than a quarter, the older entries go. A third owner keeps its quarter.
        for (owner, count, shares) in [
            (0, 40, [16, 0, 0]),
            (1, 3, [13, 3, 0]),
            (0, 100, [13, 3, 0]),
            (2, 4, [9, 3, 4]),
            (0, 100, [9, 3, 4]),
            (2, 4, [8, 3, 5]),
            (1, 1, [8, 4, 4]),
        ] {
            put(&mut places, owner, count);
            let has = |owner| places.iter().flatten().filter(|entry| entry.owner == owner).count();
            assert_eq!([0, 1, 2].map(has), shares, "{count} more of {owner}");
        }
        for owner in [2, 0, 2] {
            put(&mut places, owner, 100);
        }
        assert_eq!(places.iter().flatten().filter(|entry| entry.owner == 1).count(), 4);
    }

    #[test]
    fn where_nobody_has_more_than_a_quarter_the_oldest_goes() {
        let mut places = [None; 8];
        (0..24).for_each(|n| put(&mut places, n % 4, 1));
        let mut kept = places.map(|entry| entry.map_or(0, |entry| entry.number));
        kept.sort_unstable();
        assert_eq!(kept, [17, 18, 19, 20, 21, 22, 23, 24]);
        assert_eq!(next_to_evict(&[]), None);
    }
}
