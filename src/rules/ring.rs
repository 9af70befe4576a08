//! A ring of the latest entries in memory that several processes share, without a lock.
//!
//! Whoever writes draws a ticket, which says where its entry goes, and marks that cell as being written: nobody else
//! writes there meanwhile, and a reader that finds the mark changed while it copied throws its copy away. A process
//! that is stopped in the middle keeps nobody up: others give up on that one cell.

use std::sync::atomic::{fence, AtomicU64, Ordering};

/// How many words a cell takes: its mark, the length of the entry and the entry.
pub const CELL_WORDS: usize = 128;
/// The most bytes that an entry can have.
pub const ENTRY_MAX: usize = (CELL_WORDS - HEAD) * 8;

/// The words before the entry: mark and length.
const HEAD: usize = 2;
/// How often to look again at a cell that another process is writing.
const LOOKS: u32 = 100;

/// A ring over shared words, which are all zero at first.
#[derive(Clone, Copy)]
pub struct Ring<'a> {
    tickets: &'a AtomicU64,
    cells: &'a [AtomicU64],
}

/// The mark of a cell in which the entry with this ticket is being written: odd.
const fn being_written(ticket: u64) -> u64 {
    2 * ticket + 1
}

/// The mark of a cell which has the entry with this ticket: even, and not 0.
const fn written(ticket: u64) -> u64 {
    2 * ticket + 2
}

impl<'a> Ring<'a> {
    /// `tickets` counts the entries; `cells` has `CELL_WORDS` for each entry that is kept.
    pub fn new(tickets: &'a AtomicU64, cells: &'a [AtomicU64]) -> Self {
        Ring { tickets, cells }
    }

    /// How many entries are kept.
    pub fn size(&self) -> usize {
        self.cells.len() / CELL_WORDS
    }

    /// How many entries there have been.
    pub fn tickets(&self) -> u64 {
        self.tickets.load(Ordering::Acquire)
    }

    /// Adds an entry over the oldest one. False where it is not kept: it is too long, the ring has no cell, a newer
    /// entry has the cell already or a process does not get ready writing there.
    pub fn put(&self, entry: &[u8]) -> bool {
        if self.size() == 0 || entry.len() > ENTRY_MAX {
            return false;
        }
        let ticket = self.tickets.fetch_add(1, Ordering::AcqRel);
        let cell = self.cell(ticket);
        if !claim(&cell[0], ticket) {
            return false;
        }
        cell[1].store(entry.len() as u64, Ordering::Relaxed);
        for (word, bytes) in cell[HEAD..].iter().zip(entry.chunks(8)) {
            let mut padded = [0; 8];
            padded[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_le_bytes(padded), Ordering::Relaxed);
        }
        cell[0].store(written(ticket), Ordering::Release);
        true
    }

    /// The entries since that ticket which are still there, newest first.
    pub fn since(&self, first: u64) -> Vec<Vec<u8>> {
        let all = self.tickets();
        let oldest = all.saturating_sub(self.size() as u64).max(first);
        (oldest..all).rev().filter_map(|ticket| self.entry(ticket)).collect()
    }

    /// None where it is gone, or is not written yet.
    fn entry(&self, ticket: u64) -> Option<Vec<u8>> {
        let cell = self.cell(ticket);
        for _ in 0..LOOKS {
            match cell[0].load(Ordering::Acquire) {
                mark if mark == written(ticket) => {
                    let entry = copy(cell);
                    // What was copied is the entry only if nobody has begun to write over it.
                    fence(Ordering::Acquire);
                    return (cell[0].load(Ordering::Relaxed) == mark).then_some(entry);
                }
                mark if mark > written(ticket) => return None,
                _ => std::thread::yield_now(),
            }
        }
        None
    }

    fn cell(&self, ticket: u64) -> &'a [AtomicU64] {
        let at = (ticket % self.size() as u64) as usize * CELL_WORDS;
        &self.cells[at..at + CELL_WORDS]
    }
}

/// Marks a cell as being written by this ticket's process alone.
fn claim(mark: &AtomicU64, ticket: u64) -> bool {
    for _ in 0..LOOKS {
        let found = mark.load(Ordering::Relaxed);
        if found > being_written(ticket) {
            return false;
        }
        let idle = found.is_multiple_of(2);
        let mine = being_written(ticket);
        if idle && mark.compare_exchange(found, mine, Ordering::Acquire, Ordering::Relaxed).is_ok()
        {
            // A reader that sees a word of this entry sees the mark, too.
            fence(Ordering::Release);
            return true;
        }
        std::thread::yield_now();
    }
    false
}

fn copy(cell: &[AtomicU64]) -> Vec<u8> {
    let length = usize::try_from(cell[1].load(Ordering::Relaxed)).unwrap_or(0).min(ENTRY_MAX);
    let words = &cell[HEAD..HEAD + length.div_ceil(8)];
    let mut bytes: Vec<u8> =
        words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
    bytes.truncate(length);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    fn words(cells: usize) -> (AtomicU64, Vec<AtomicU64>) {
        (AtomicU64::new(0), (0..cells * CELL_WORDS).map(|_| AtomicU64::new(0)).collect())
    }

    #[test]
    fn the_latest_are_kept_newest_first() {
        let (tickets, cells) = words(3);
        let ring = Ring::new(&tickets, &cells);
        assert!(ring.since(0).is_empty());
        for n in 0..5u8 {
            assert!(ring.put(&vec![n; usize::from(n) * 7]));
        }
        assert_eq!(ring.since(0), [vec![4; 28], vec![3; 21], vec![2; 14]]);
        assert_eq!(ring.since(4), [vec![4; 28]]);
        assert!(ring.since(5).is_empty());
    }

    #[test]
    fn the_longest_entry_fits_and_a_longer_one_is_not_kept() {
        let (tickets, cells) = words(1);
        let ring = Ring::new(&tickets, &cells);
        assert!(ring.put(&[7; ENTRY_MAX]));
        assert!(!ring.put(&[8; ENTRY_MAX + 1]));
        assert_eq!(ring.since(0), [vec![7; ENTRY_MAX]]);
    }

    #[test]
    fn a_ring_without_places_keeps_nothing() {
        let (tickets, cells) = words(0);
        let ring = Ring::new(&tickets, &cells);
        assert!(!ring.put(b"x") && ring.since(0).is_empty());
    }

    #[test]
    fn a_process_that_stopped_while_it_wrote_costs_one_place() {
        let (tickets, cells) = words(2);
        let ring = Ring::new(&tickets, &cells);
        assert!(ring.put(b"a"));
        // The second one stops in the middle.
        let stopped = tickets.fetch_add(1, Ordering::AcqRel);
        assert!(claim(&ring.cell(stopped)[0], stopped));
        assert_eq!(ring.since(0), [b"a"]);
        assert!(ring.put(b"c"));
        assert!(!ring.put(b"d"), "its cell is still being written");
        assert!(ring.put(b"e"));
        assert_eq!(ring.since(0), [b"e"]);
        // It goes on.
        ring.cell(stopped)[0].store(written(stopped), Ordering::Release);
        assert!(ring.put(b"f"));
        assert_eq!(ring.since(0), [b"f", b"e"]);
    }

    #[test]
    fn a_late_writer_does_not_write_over_a_newer_entry() {
        let (tickets, cells) = words(1);
        let ring = Ring::new(&tickets, &cells);
        let late = tickets.fetch_add(1, Ordering::AcqRel);
        assert!(ring.put(b"newer"));
        assert!(!claim(&cells[0], late));
        assert_eq!(ring.since(0), [b"newer"]);
    }

    /// An entry whose bytes are all the same, and whose length goes by them.
    fn entry(n: u8) -> Vec<u8> {
        vec![n; 4 * usize::from(n) + 1]
    }

    #[test]
    fn no_reader_sees_a_torn_entry() {
        let (tickets, cells) = words(4);
        let ring = Ring::new(&tickets, &cells);
        let over = AtomicBool::new(false);
        let seen = std::thread::scope(|threads| {
            let read = || {
                let mut seen = 0;
                while !over.load(Ordering::Relaxed) {
                    for found in ring.since(0) {
                        assert_eq!(found, entry(found[0]), "torn");
                        seen += 1;
                    }
                }
                seen
            };
            let readers = [threads.spawn(read), threads.spawn(read)];
            let write = |from: u8| {
                for n in 0..40_000u32 {
                    ring.put(&entry(from + (n % 100) as u8));
                }
            };
            let writers = [threads.spawn(move || write(0)), threads.spawn(move || write(100))];
            writers.into_iter().for_each(|w| w.join().unwrap());
            over.store(true, Ordering::Relaxed);
            readers.into_iter().map(|r| r.join().unwrap()).sum::<u32>()
        });
        assert!(seen > 0);
        assert_eq!(ring.tickets(), 80_000);
        assert_eq!(ring.since(0).len(), 4);
    }
}
