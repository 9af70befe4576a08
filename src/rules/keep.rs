//! The heartbeat of a process that holds many leases: when to send each of them again.

use crate::Span;

/// The longest time until a renewed lease is sent again: a day.
const LONGEST: Span = Span::from_secs(86_400);
/// The shortest time until a locked lease is sent again.
const SHORTEST: Span = Span::from_micros(10_000);

/// Time until a renewed lease is sent again: a third of its ttl, so that two heartbeats may fail.
pub fn after_renewal(ttl: Span) -> Span {
    Span::from_micros(ttl.micros() / 3).min(LONGEST)
}

/// Time until a lease is sent again that another transaction was changing, given the grant's remaining life.
pub fn while_locked(remaining: Span) -> Span {
    Span::from_micros(remaining.micros() / 10).max(SHORTEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_sent_again_while_it_still_has_time() {
        let seconds = Span::from_secs;
        for (ttl, again) in
            [(30, 10), (3, 1), (259_200, 86_400), (259_203, 86_400), (1 << 40, 86_400)]
        {
            assert_eq!(after_renewal(seconds(ttl)), seconds(again), "ttl {ttl} s");
        }
        assert_eq!(after_renewal(Span::from_micros(1)), Span::ZERO);
        for (left_us, again_us) in [
            (10_000_000, 1_000_000),
            (100_000, 10_000),
            (99_999, 10_000),
            (0, 10_000),
            (-5, 10_000),
        ] {
            let again = while_locked(Span::from_micros(left_us));
            assert_eq!(again, Span::from_micros(again_us), "{left_us} us left");
        }
    }
}
