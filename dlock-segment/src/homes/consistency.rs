//! What the counters of the homes say about each other: pure.

use super::Seen;

/// What holds, or does not, between the homes of a sale.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct HomeComparison {
    /// The units that were sent and not received yet.
    pub(crate) in_transit: u64,
    /// The units that were received and whose sending is lost: they exist twice.
    pub(crate) lost_sends: u64,
    /// What a home has lost, in words.
    pub(crate) losses: Vec<String>,
}

/// Compares the homes. Receivers were looked at before senders, and no counter ever falls: so
/// what is more than was sent is a loss, and not a move that goes on. `latest` is the latest
/// change of each home that this process has seen.
pub(crate) fn compare(receivers: &[Seen], senders: &[Seen], latest: &[u64]) -> HomeComparison {
    let mut comparison = HomeComparison::default();
    for (from, sender) in senders.iter().enumerate() {
        let now = sender.view.changes;
        let named = receivers.iter().map(|receiver| receiver.received[from].1).max();
        let before = named.unwrap_or(0).max(latest[from]);
        if before > now {
            comparison.losses.push(format!(
                "home {from} lost data: it is at change {now}, and was at {before} before; run reconcile() to find the lost orders"
            ));
        }
        for (to, receiver) in receivers.iter().enumerate() {
            let (sent, received) = (sender.sent[to], receiver.received[from].0);
            comparison.in_transit += sent.saturating_sub(received);
            if received > sent {
                let units = received - sent;
                comparison.lost_sends += units;
                comparison.losses.push(format!(
                    "home {from} sent {sent} units to home {to}, which received {received}: home {from} lost the sending of {units} units, and has them too"
                ));
            }
        }
    }
    comparison
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planted_bug::PlantedBug;
    use crate::store::home::Home;
    use crate::store::{Answer, Request, Terms, View};

    const EACH: u64 = 10;
    const RETENTION: u64 = 1_000;

    /// Every step of three moves between two homes, with sales before, between and after. The
    /// first home sends 4 and then 3 units to the second one, which sends 2 back.
    fn steps() -> Vec<(usize, Request)> {
        let sell = |id: &str, quantity| {
            let operation = Some(id.into());
            Request::Deduct { quantity, operation, buyer: None }
        };
        vec![
            (0, sell("first", 1)),
            (0, Request::Send { to: 1, quantity: 4, after: 0 }),
            (1, Request::Receive { from: 0, total: 4, seen: 2 }),
            (1, sell("moved", 12)),
            (0, Request::Send { to: 1, quantity: 3, after: 4 }),
            (1, Request::Receive { from: 0, total: 7, seen: 3 }),
            (1, Request::Send { to: 0, quantity: 2, after: 0 }),
            (0, Request::Receive { from: 1, total: 2, seen: 4 }),
            (0, sell("last", 1)),
        ]
    }

    /// What each home has ever sent to and received from the other one after each step.
    const SENT: [[u64; 2]; 10] =
        [[0, 0], [0, 0], [4, 0], [4, 0], [4, 0], [7, 0], [7, 0], [7, 2], [7, 2], [7, 2]];
    const RECEIVED: [[u64; 2]; 10] =
        [[0, 0], [0, 0], [0, 0], [0, 4], [0, 4], [0, 4], [0, 7], [0, 7], [2, 7], [2, 7]];

    /// A home as it was after so many steps.
    fn home_after(home: usize, count: usize) -> Home {
        let terms = Terms {
            stock: EACH,
            segments: 2,
            per_buyer: 0,
            opens_at: 0,
            closes_at: 0,
            retention: RETENTION,
            journal: 0,
            directory: "two homes".into(),
        };
        let mut made = Home::new(1, terms, PlantedBug::default());
        for (_, request) in steps().iter().take(count).filter(|(at, _)| *at == home) {
            made.apply(10, 0, request);
        }
        made
    }

    fn total(answer: &Answer) -> (u64, u64) {
        match *answer {
            Answer::Moved { total, seen } => (total, seen),
            ref other => panic!("{other:?}"),
        }
    }

    fn seen(homes: &mut [Home; 2], now: u64) -> Vec<Seen> {
        let look = |home: &mut Home| {
            let sent = |to| Request::Send { to, quantity: 0, after: 0 };
            let received = |from| Request::Receive { from, total: 0, seen: 0 };
            Seen {
                view: home.view(now),
                sent: (0..2).map(|to| total(&home.apply(now, 0, &sent(to))).0).collect(),
                received: (0..2).map(|from| total(&home.apply(now, 0, &received(from)))).collect(),
            }
        };
        homes.iter_mut().map(look).collect()
    }

    /// Compares the homes, and checks that all units add up with what is between them.
    fn compared(homes: &mut [Home; 2], now: u64, latest: [u64; 2]) -> HomeComparison {
        let seen = seen(homes, now);
        let comparison = compare(&seen, &seen, &latest);
        let units = seen.iter().map(|Seen { view, .. }| view.available + view.reserved + view.sold);
        let here = units.sum::<u64>() + comparison.in_transit - comparison.lost_sends;
        assert_eq!(here, 2 * EACH, "{comparison:?}");
        comparison
    }

    /// Each home goes back to before and after each step, at any later step: the difference
    /// is exactly what it lost.
    #[test]
    fn a_home_that_went_back_shows_exactly_what_it_lost() {
        for at in 0..SENT.len() {
            for (back, home) in (0..=at).flat_map(|back| [(back, 0), (back, 1)]) {
                let other = 1 - home;
                let mut homes = [0, 1].map(|n| home_after(n, if n == home { back } else { at }));
                let comparison = compared(&mut homes, 20, [0, 0]);
                let what = format!("home {home} from step {at} to {back}: {comparison:?}");
                // It sent less than the other one received, or received less than was sent.
                let (sent, received) = (SENT[back][home], RECEIVED[at][other]);
                let lost = received.saturating_sub(sent);
                let back_here = SENT[at][other] - RECEIVED[back][home];
                let in_transit = sent.saturating_sub(received) + back_here;
                assert_eq!(
                    (comparison.lost_sends, comparison.in_transit),
                    (lost, in_transit),
                    "{what}"
                );
                let named = seen(&mut homes, 20)[other].received[home].1;
                let went_back = named > homes[home].view(20).changes;
                assert!(went_back || lost == 0, "a lost sending is a lost change: {what}");
                let losses = usize::from(lost > 0) + usize::from(went_back);
                assert_eq!(comparison.losses.len(), losses, "{what}");
                // A process that has seen the last change notices any that was lost.
                let latest = [0, 1].map(|n| home_after(n, at).view(20).changes);
                let is_behind = homes[home].view(20).changes < latest[home];
                let known = compared(&mut homes, 20, latest).losses;
                assert_eq!(known.iter().any(|it| it.contains("lost data")), is_behind, "{what}");
            }
        }
    }

    /// Every move is made again, in order, after three retentions: nothing moves twice, and
    /// what a home lost is made good.
    #[test]
    fn a_move_that_is_repeated_after_three_retentions_moves_nothing() {
        let later = 10 + 3 * RETENTION + 1;
        let last = steps().len();
        for (back, home) in (0..=last).flat_map(|back| [(back, 0), (back, 1)]) {
            let mut homes = [0, 1].map(|n| home_after(n, if n == home { back } else { last }));
            let before = homes.each_ref().map(|home| home.view(later));
            for (at, request) in steps() {
                if matches!(request, Request::Send { .. } | Request::Receive { .. }) {
                    homes[at].apply(later, 0, &request);
                }
            }
            let comparison = compared(&mut homes, later, [0, 0]);
            assert_eq!(
                (comparison.lost_sends, comparison.in_transit),
                (0, 0),
                "home {home} at {back}"
            );
            if back == last {
                let after = homes.each_ref().map(|home| home.view(later));
                let counts = |view: &View| (view.available, view.sold, view.sent, view.received);
                assert_eq!(before.each_ref().map(counts), after.each_ref().map(counts));
            }
        }
    }
}
