//! Properties of the pure rules, for whatever input.

use pg_fence_rules::fence::{judge, Landing, Order, Verdict, Write};
use pg_fence_rules::grant::{
    self, Acquire, Ask, ExistingGrant, Grant, Mode, Phase, Release, Tokens,
};
use pg_fence_rules::moves::{self, Due, Identity, Recorded, Start, CLOCK_ZERO, STRIDE};
use pg_fence_rules::template::{self, Piece};
use pg_fence_rules::{Floor, Instant, Span, Token};
use proptest::collection::vec;
use proptest::prelude::*;
use std::ops::Range;

/// A thing that happens to a lease.
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

/// A row of the lease table, with whose it is and whether an open transaction relies on it.
#[derive(Clone, Debug)]
struct Row {
    grant: Grant,
    who: usize,
    guarded: bool,
}

fn live(rows: &[Row], now: Instant) -> Vec<&Row> {
    rows.iter().filter(|row| row.grant.phase(now) == Phase::Held).collect()
}

/// Nothing lives beside an exclusive grant, no mode beside another, and no more than the slots.
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

/// The verdict on an acquire among these rows.
fn decide(rows: &[Row], who: usize, ask: &Ask, now: Instant) -> Acquire {
    let existing =
        |row: &Row| ExistingGrant { grant: row.grant, mine: row.who == who, guarded: row.guarded };
    grant::admit(&rows.iter().map(existing).collect::<Vec<_>>(), ask, now)
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

fn identity() -> impl Strategy<Value = Identity> {
    let parts = (0..3u32, 0..3u64, 0..3u32, 0..3u32);
    parts.prop_map(|(timeline, system, database, sequence)| Identity {
        timeline,
        system_identifier: system << 40,
        database,
        sequence,
    })
}

fn start() -> impl Strategy<Value = Start> {
    (instant(0..3), 0..3u32, 0..3u32).prop_map(|(server, database, file)| Start {
        server,
        database,
        file,
    })
}

/// Writes a template of these pieces.
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
        // Two literals in a row are one.
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
                    let ask = Ask { mode, reclaim };
                    let Acquire::Grant { slot } = decide(&rows, who, &ask, now) else { continue };
                    prop_assert!(slot >= 0 && (mode != Mode::Exclusive || slot == 0));
                    if reclaim {
                        // As the caller of the rule does: what it takes back elsewhere ends.
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
    fn taken_says_when_the_clock_can_change_it(
        modes in vec((mode(), instant(1..60), any::<bool>()), 1..4), asked in mode(), now in instant(0..50),
    ) {
        let row = |(i, (mode, expires, guarded)): (usize, &(Mode, Instant, bool))| {
            let grant = grant(*mode, i as i32, Token::from_bigint(i as i64 + 1), *expires);
            Row { grant, who: 0, guarded: *guarded }
        };
        let rows: Vec<Row> = modes.iter().enumerate().map(row).collect();
        let ask = Ask { mode: asked, reclaim: false };
        if let Acquire::Taken { until } = decide(&rows, 1, &ask, now) {
            // None is never.
            prop_assert!(until.is_none_or(|until| until > now));
            for later in now.micros()..until.map_or(100, Instant::micros).min(100) {
                let then = decide(&rows, 1, &ask, Instant::from_micros(later));
                prop_assert!(!matches!(then, Acquire::Grant { .. }), "granted at {later}: {then:?}");
            }
        }
    }

    #[test]
    fn the_first_and_the_latest_sixteen_tokens_count_and_nothing_else(
        first in 1..1000i64, steps in vec(1..5i64, 0..40),
    ) {
        let first = Token::from_bigint(first);
        let (mut tokens, mut all) = (Tokens::new(first, &[]), vec![first]);
        for step in steps {
            let next = Token::from_bigint(all[all.len() - 1].bigint() + step);
            tokens = tokens.renew(next);
            all.push(next);
        }
        let latest = &all[1..][all[1..].len().saturating_sub(16)..];
        prop_assert_eq!(tokens.renewed(), latest);
        prop_assert_eq!(tokens.latest(), all[all.len() - 1]);
        prop_assert_eq!(Tokens::new(first, &all[1..]), tokens);
        for token in (first.bigint() - 1..all[all.len() - 1].bigint() + 2).map(Token::from_bigint) {
            let counts = token == first || latest.contains(&token);
            prop_assert_eq!(tokens.contains(token), counts, "{}", token);
        }
    }

    #[test]
    fn what_may_renew_may_release_and_what_speaks_may_do_both(
        asked in token(0..20), now in instant(0..100), floor in token(0..20).prop_map(Floor::at), expires in instant(0..100),
        closing in prop::option::of(token(10..20)), closed_here in any::<bool>(),
    ) {
        let closed_here = closed_here && closing.is_some();
        let own = [5, 7, 9].map(Token::from_bigint);
        let tokens = Tokens::new(own[0], &own[1..]);
        let grant =
            Grant { tokens, closing, closed_here, ..grant(Mode::Exclusive, 0, own[0], expires) };
        let speaks = grant.speaks(asked, now, floor);
        prop_assert_eq!(grant.release(asked, now) == Release::Close, grant.renewable(asked, now));
        prop_assert!(!speaks || tokens.latest() > floor.token(), "it speaks though a jump lies in between");
        let would_speak = grant.speaks(asked, now, Floor::NONE);
        prop_assert_eq!(grant.awaits_renewal(asked, now, floor), would_speak && floor.token() >= tokens.latest());
        if speaks && closing.is_none() {
            prop_assert!(grant.renewable(asked, now));
        }
        if grant.renewable(asked, now) {
            prop_assert!(now < expires && closing.is_none() && own.contains(&asked));
        }
    }

    #[test]
    fn no_write_lands_by_a_lower_token_or_one_never_issued(w in write(), strict in any::<bool>(), bound in any::<bool>()) {
        let order = if strict { Order::Strict } else { Order::Monotonic };
        let issued = |token: Token| (1..=9).contains(&token.bigint());
        let Verdict::Land(Landing { token, fence }) = judge(&w, order, bound, issued) else { return Ok(()) };
        prop_assert!(issued(token));
        let ambient = w.ambient.filter(|_| !w.column_presents());
        prop_assert_eq!(Some(token), ambient.or(w.new.flatten()));
        let stored = w.old.flatten();
        // A row never goes back, and what it gets is either there already or was presented.
        prop_assert_eq!(Some(fence), stored.max(Some(token)));
        if let Some(stored) = stored.filter(|_| strict || !bound) {
            prop_assert!(token > stored || !strict && token == stored);
        }
    }

    #[test]
    fn being_bound_changes_nothing_but_what_becomes_of_a_lower_token(w in write(), strict in any::<bool>()) {
        let order = if strict { Order::Strict } else { Order::Monotonic };
        let issued = |token: Token| (1..=9).contains(&token.bigint());
        let (unbound, bound) = (judge(&w, order, false, issued), judge(&w, order, true, issued));
        match (unbound, bound) {
            (Verdict::Stale { presented, stored }, Verdict::Land(landing)) => {
                prop_assert!(!strict && presented < stored);
                prop_assert_eq!(landing, Landing { token: presented, fence: stored });
            }
            _ => prop_assert_eq!(unbound, bound),
        }
    }

    #[test]
    fn a_write_that_presents_nothing_does_not_land(old in prop::option::of(token(1..9)), named in any::<bool>()) {
        let w = Write { old: Some(old), new: Some(old), named, ambient: None };
        let lands = |order| matches!(judge(&w, order, false, |_| true), Verdict::Land(_));
        prop_assert!(!lands(Order::Strict));
        prop_assert_eq!(lands(Order::Monotonic), named && old.is_some());
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

    #[test]
    fn a_move_outruns_the_past_and_the_clock(
        last in 0..(1i64 << 52), more in 0..(1i64 << 30), now in instant(0..1i64 << 60), later in span(0..1i64 << 50),
    ) {
        let target_of =
            |last: i64, now| moves::target(Token::from_bigint(last), now).unwrap().bigint();
        let target = target_of(last, now);
        prop_assert!(target >= last + STRIDE);
        let elapsed = now.since(CLOCK_ZERO).micros().max(0);
        let (seconds, us) = (elapsed / 1_000_000, elapsed % 1_000_000);
        prop_assert!(target >= seconds * STRIDE + us * STRIDE / 1_000_000);
        prop_assert!(target_of(last + more, now + later) >= target);
        prop_assert!(target_of(target, now) >= target + STRIDE);
    }

    #[test]
    fn a_life_has_begun_only_when_all_of_it_is_the_same(
        kept in (identity(), start()), found in (identity(), start()),
        dumped in token(0..5), last in token(0..5), passed in token(0..5), marked in any::<bool>(),
    ) {
        let recorded =
            Recorded { identity: Some(kept.0.mark()), start: Some(kept.1.mark()), dumped, last };
        let due = moves::due(&recorded, &found.0, marked.then_some(&found.1), passed);
        let began = marked && kept.1 == found.1;
        let set_back = last < passed || last < dumped;
        prop_assert_eq!(due, match kept.0 == found.0 {
            false => Due::Jump,
            true if set_back => Due::Jump,
            true if began => Due::Nothing,
            true => Due::Move,
        });
        prop_assert!(found.0.mark() > 0 && found.1.mark() > 0);
    }
}
