//! The heartbeat of a process that keeps many leases: when to send each of them again.

use crate::Span;

/// One that was kept is sent again at the latest after a day.
const LONGEST: Span = Span::from_secs(86_400);
/// One that was in somebody's hands is sent again no sooner than this.
const SHORTEST: Span = Span::from_micros(10_000);

/// How long until a lease is sent again that was renewed for so long: a third of that, so that two more calls may fail.
pub fn after_renewal(ttl: Span) -> Span {
    Span::from_micros(ttl.micros() / 3).min(LONGEST)
}

/// How long until a lease is sent again whose grant has so long left, and which somebody else was just changing.
pub fn while_in_the_way(remaining: Span) -> Span {
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
            let again = while_in_the_way(Span::from_micros(left_us));
            assert_eq!(again, Span::from_micros(again_us), "{left_us} us left");
        }
    }
}
