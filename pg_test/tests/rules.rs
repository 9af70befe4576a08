//! Properties of the pure rules, for any input.

use pg_fence_rules::fence::{Landing, Order, Verdict, Write, check};
use pg_fence_rules::grant::{
    self, Acquire, AcquireRequest, ExistingGrant, Grant, Mode, Phase, Release, Tokens,
};
use pg_fence_rules::template::{self, Piece};
use pg_fence_rules::{Epoch, Instant, Span, Token};
use proptest::collection::vec;
use proptest::prelude::*;
use std::ops::Range;

/// An event in the life of a lease.
#[derive(Clone, Debug)]
enum Event {
    Acquire { mode: Mode, who: usize, ttl: Span, reclaim: bool },
    Close(usize),
    Guard(usize),
    Unguard(usize),
    Wait(Span),
}

fn span(us: Range<i64>) -> impl Strategy<Value = Span> {
    us.prop_map(Span::from_micros)
}

fn instant(us: Range<i64>) -> impl Strategy<Value = Instant> {
    us.prop_map(Instant::from_micros)
}

fn mode() -> impl Strategy<Value = Mode> {
    prop_oneof![Just(Mode::Exclusive), Just(Mode::Shared), (1..4i32).prop_map(Mode::Slots)]
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => (mode(), 0..3usize, span(1..40), any::<bool>())
            .prop_map(|(mode, who, ttl, reclaim)| Event::Acquire { mode, who, ttl, reclaim }),
        1 => (0..4usize).prop_map(Event::Close),
        1 => (0..4usize).prop_map(Event::Guard),
        1 => (0..4usize).prop_map(Event::Unguard),
        3 => span(1..30).prop_map(Event::Wait),
    ]
}

/// A row of the lease table, with its holder and whether an open transaction relies on it.
#[derive(Clone, Debug)]
struct Row {
    grant: Grant,
    who: usize,
    guarded: bool,
}

fn live(rows: &[Row], now: Instant) -> Vec<&Row> {
    rows.iter().filter(|row| row.grant.phase(now) == Phase::Held).collect()
}

/// Checks that no grant lives beside an exclusive one, that no two modes live together, and that there are no more
/// grants than slots.
fn check_company(rows: &[Row], now: Instant) -> Result<(), TestCaseError> {
    let live = live(rows, now);
    for row in &live {
        let most = match row.grant.mode {
            Mode::Exclusive => 1,
            Mode::Shared => usize::MAX,
            Mode::Slots(n) => n as usize,
        };
        prop_assert!(live.len() <= most, "{} live beside {:?}", live.len(), row.grant.mode);
        prop_assert!(live.iter().all(|other| other.grant.mode == row.grant.mode), "{live:?}");
    }
    Ok(())
}

/// Returns the verdict on an acquire among these rows.
fn decide(rows: &[Row], who: usize, request: &AcquireRequest, now: Instant) -> Acquire {
    let existing =
        |row: &Row| ExistingGrant { grant: row.grant, mine: row.who == who, guarded: row.guarded };
    grant::admit(&rows.iter().map(existing).collect::<Vec<_>>(), request, now)
}

fn token(number: Range<i64>) -> impl Strategy<Value = Token> {
    number.prop_map(Token::from_bigint)
}

fn grant(mode: Mode, slot: i32, token: Token, expires_at: Instant) -> Grant {
    let tokens = Tokens::new(token, &[]);
    Grant {
        slot,
        mode,
        tokens,
        closing: None,
        closed_here: false,
        expires_at,
        abandoned: false,
        adopted: None,
    }
}

fn write() -> impl Strategy<Value = Write> {
    let fence = || prop::option::of(token(-2..12));
    let ambient = prop::option::of(token(1..12));
    (prop::option::of(fence()), prop::option::of(fence()), any::<bool>(), ambient)
        .prop_map(|(old, new, named, ambient)| Write { old, new, named, ambient })
}

/// Writes a template from these pieces.
fn render(pieces: &[Piece]) -> Vec<u8> {
    let mut text = Vec::new();
    for piece in pieces {
        match piece {
            Piece::Literal(bytes) => {
                for &byte in bytes {
                    let times = 1 + usize::from(byte == b'{' || byte == b'}');
                    text.extend(std::iter::repeat_n(byte, times));
                }
            }
            Piece::Column(name) => text.extend([b"{", name.as_slice(), b"}"].concat()),
        }
    }
    text
}

fn pieces() -> impl Strategy<Value = Vec<Piece>> {
    let literal = "[a-z:{}é ]{1,6}".prop_map(|text| Piece::Literal(text.into_bytes()));
    let column = "[a-z_é ]{1,6}".prop_map(|text| Piece::Column(text.into_bytes()));
    vec(prop_oneof![literal, column], 0..6).prop_map(|mut pieces| {
        // Two adjacent literals would be read as one.
        pieces.dedup_by(|b, a| matches!((a, b), (Piece::Literal(_), Piece::Literal(_))));
        pieces
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2000) })]

    #[test]
    fn no_grant_is_made_in_bad_company_or_over_a_guard(events in vec(event(), 1..40)) {
        let (mut rows, mut now) = (Vec::<Row>::new(), Instant::from_micros(0));
        let mut token = Token::BEFORE_ALL;
        for event in events {
            match event {
                Event::Acquire { mode, who, ttl, reclaim } => {
                    let request = AcquireRequest { mode, reclaim };
                    let Acquire::Grant { slot } = decide(&rows, who, &request, now) else { continue };
                    prop_assert!(slot >= 0 && (mode != Mode::Exclusive || slot == 0));
                    if reclaim {
                        // As the rule's caller does: what a reclaim takes back elsewhere is ended.
                        for row in rows.iter_mut().filter(|r| r.who == who && !r.guarded) {
                            row.grant.closing = row.grant.closing.or(Some(token));
                        }
                    }
                    if let Some(old) = rows.iter().find(|r| r.grant.slot == slot) {
                        prop_assert!(!old.guarded, "a guarded grant is replaced: {old:?}");
                        prop_assert!(old.grant.phase(now) != Phase::Held, "a live one is: {old:?}");
                    }
                    if mode == Mode::Exclusive {
                        prop_assert!(!rows.iter().any(|r| r.guarded), "beside a guard: {rows:?}");
                    }
                    token = Token::from_bigint(token.bigint() + 1);
                    rows.retain(|r| r.grant.slot != slot);
                    let grant = grant(mode, slot, token, now + ttl);
                    rows.push(Row { grant, who, guarded: false });
                }
                Event::Close(i) => {
                    if let Some(row) = rows.get_mut(i) {
                        row.grant.closing = Some(token);
                    }
                }
                Event::Guard(i) => {
                    if let Some(row) = rows.get_mut(i) {
                        row.guarded |= row.grant.phase(now) == Phase::Held;
                    }
                }
                Event::Unguard(i) => {
                    if let Some(row) = rows.get_mut(i) {
                        row.guarded = false;
                    }
                }
                Event::Wait(time) => now = now + time,
            }
            check_company(&rows, now)?;
        }
    }

    #[test]
    fn what_may_renew_may_release_and_what_speaks_may_do_both(
        presented in token(0..20), now in instant(0..100), epoch in token(0..20).prop_map(Epoch::at), expires in instant(0..100),
        closing in prop::option::of(token(10..20)), closed_here in any::<bool>(),
    ) {
        let closed_here = closed_here && closing.is_some();
        let own = [5, 7, 9].map(Token::from_bigint);
        let tokens = Tokens::new(own[0], &own[1..]);
        let grant =
            Grant { tokens, closing, closed_here, ..grant(Mode::Exclusive, 0, own[0], expires) };
        let speaks = grant.speaks(presented, now, epoch);
        prop_assert_eq!(grant.release(presented, now) == Release::Close, grant.renewable(presented, now));
        prop_assert!(!speaks || tokens.latest() > epoch.token(), "it speaks although a new epoch has begun");
        let would_speak = grant.speaks(presented, now, Epoch::FIRST);
        prop_assert_eq!(grant.awaits_renewal(presented, now, epoch), would_speak && epoch.token() >= tokens.latest());
        if speaks && closing.is_none() {
            prop_assert!(grant.renewable(presented, now));
        }
        if grant.renewable(presented, now) {
            prop_assert!(now < expires && closing.is_none() && own.contains(&presented));
        }
    }

    #[test]
    fn no_write_lands_by_a_lower_token_or_one_never_issued(w in write(), strict in any::<bool>(), bound in any::<bool>()) {
        let order = if strict { Order::Strict } else { Order::Monotonic };
        let issued = |token: Token| (1..=9).contains(&token.bigint());
        let Verdict::Land(Landing { token, fence }) = check(&w, order, bound, issued) else { return Ok(()) };
        prop_assert!(issued(token));
        let ambient = w.ambient.filter(|_| !w.column_presents());
        prop_assert_eq!(Some(token), ambient.or(w.new.flatten()));
        let stored = w.old.flatten();
        // A row's fence never falls, and its new value was either stored or presented.
        prop_assert_eq!(Some(fence), stored.max(Some(token)));
        if let Some(stored) = stored.filter(|_| strict || !bound) {
            prop_assert!(token > stored || !strict && token == stored);
        }
    }

    #[test]
    fn a_template_is_read_as_it_was_written(pieces in pieces()) {
        prop_assert_eq!(template::parse(&render(&pieces)), Ok(pieces));
    }

    #[test]
    fn any_text_is_a_template_or_refused(text in vec(any::<u8>(), 0..40)) {
        if let Ok(pieces) = template::parse(&text) {
            prop_assert_eq!(render(&pieces), text);
        }
    }
}
