//! Pure: which home sends how many units to which.

/// A move that is planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Move {
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) units: u64,
}

/// Brings a home to `quantity` units at least, and to its equal share if that is more. `None`
/// stands for a home that cannot be reached. Empty if all together have too little.
///
/// Homes give first what they have above their own share. Only if that is not enough do they
/// give what they need themselves.
pub(super) fn pull(available: &[Option<u64>], to: usize, quantity: u64) -> Vec<Move> {
    let has = |home: usize| available[home].unwrap_or(0);
    let total: u64 = available.iter().flatten().sum();
    if total < quantity {
        return Vec::new();
    }
    let reached = available.iter().flatten().count().max(1) as u64;
    let share = total / reached;
    let mut wanted = share.max(quantity).saturating_sub(has(to));
    let mut donors: Vec<usize> = (0..available.len()).filter(|home| *home != to).collect();
    donors.sort_by_key(|home| std::cmp::Reverse(has(*home)));
    let mut gives = vec![0; available.len()];
    // What is above the share is given first; the rest only for what was asked for.
    for spared in [share, 0] {
        if spared == 0 {
            let gathered = has(to) + gives.iter().sum::<u64>();
            wanted = quantity.saturating_sub(gathered);
        }
        for &home in &donors {
            let units = (has(home) - gives[home]).saturating_sub(spared).min(wanted);
            gives[home] += units;
            wanted -= units;
        }
    }
    let moves = donors.into_iter().map(|from| Move { from, to, units: gives[from] });
    moves.filter(|planned| planned.units > 0).collect()
}

/// Levels the homes before one runs dry, by the rate at which each sells. A home that has
/// less than half of its due gets all of it. Homes that are near to it are left alone, so
/// that moves stay rare.
pub(super) fn level(available: &[Option<u64>], rates: &[f64], always: bool) -> Vec<Move> {
    let reached: Vec<usize> =
        (0..available.len()).filter(|home| available[*home].is_some()).collect();
    let total: u64 = available.iter().flatten().sum();
    let rate: f64 = reached.iter().map(|home| rates[*home]).sum();
    if reached.len() < 2 || total == 0 {
        return Vec::new();
    }
    // Half is shared equally: a home that sold nothing so far may be the next that sells.
    let even = 1.0 / reached.len() as f64;
    let has = |home: usize| available[home].unwrap_or(0);
    let mut dues = vec![0; available.len()];
    for &home in &reached {
        let by_rate = if rate > 0.0 { rates[home] / rate } else { even };
        dues[home] = (total as f64 * (even + by_rate) / 2.0) as u64;
    }
    // What is left by the division stays where most is.
    let mut most = reached.clone();
    most.sort_by_key(|home| std::cmp::Reverse(has(*home)));
    let left = total.saturating_sub(dues.iter().sum());
    for &home in most.iter().cycle().take(left.min(reached.len() as u64) as usize) {
        dues[home] += 1;
    }
    let due = |home: usize| dues[home];
    let is_low =
        |home: usize| if always { has(home) < due(home) } else { has(home) < due(home) / 2 };
    let mut spare: Vec<u64> =
        (0..available.len()).map(|home| has(home).saturating_sub(due(home))).collect();
    let mut moves = Vec::new();
    for to in reached.iter().copied().filter(|home| is_low(*home)) {
        let mut wanted = due(to) - has(to);
        while wanted > 0 {
            let Some(from) = reached.iter().copied().max_by_key(|home| spare[*home]) else { break };
            let units = spare[from].min(wanted);
            if units == 0 {
                break;
            }
            spare[from] -= units;
            wanted -= units;
            moves.push(Move { from, to, units });
        }
    }
    moves
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(available: &[u64], moves: &[Move]) -> Vec<u64> {
        let mut after = available.to_vec();
        for planned in moves {
            after[planned.from] -= planned.units;
            after[planned.to] += planned.units;
        }
        after
    }

    fn pulled(available: &[u64], to: usize, quantity: u64) -> Vec<u64> {
        let some: Vec<_> = available.iter().copied().map(Some).collect();
        after(available, &pull(&some, to, quantity))
    }

    #[test]
    fn a_dry_home_gets_its_share() {
        assert_eq!(pulled(&[0, 900, 0], 0, 1), [300, 600, 0]);
        assert_eq!(pulled(&[0, 500, 400], 0, 1), [300, 300, 300]);
        assert_eq!(pulled(&[0, 301, 300], 0, 1), [200, 200, 201]);
    }

    #[test]
    fn units_that_no_home_has_alone_are_gathered() {
        assert_eq!(pulled(&[1, 1, 1], 1, 3), [0, 3, 0]);
        assert_eq!(pulled(&[2, 2, 2], 0, 5), [5, 0, 1]);
        assert_eq!(pulled(&[0, 0, 1], 0, 1), [1, 0, 0]);
        assert_eq!(pulled(&[1, 1, 1], 1, 4), [1, 1, 1], "all together have too little");
    }

    #[test]
    fn a_home_out_of_reach_gives_nothing() {
        assert_eq!(pull(&[Some(0), None, Some(4)], 0, 2), [Move { from: 2, to: 0, units: 2 }]);
        assert_eq!(pull(&[Some(0), None, Some(1)], 0, 2), []);
    }

    #[test]
    fn every_plan_keeps_the_sum_and_serves_the_request() {
        for seed in 0..5_000_u64 {
            let count = 2 + seed as usize % 5;
            let available: Vec<u64> =
                (0..count as u64).map(|home| seed.wrapping_mul(home * 7 + 3) % 11).collect();
            let (to, quantity) = (seed as usize % count, 1 + seed % 13);
            let after = pulled(&available, to, quantity);
            assert_eq!(after.iter().sum::<u64>(), available.iter().sum::<u64>());
            let enough = available.iter().sum::<u64>() >= quantity;
            assert_eq!(enough, after[to] >= quantity, "{available:?} to {to}: {quantity}");
        }
    }

    #[test]
    fn homes_are_levelled_by_their_rates() {
        let levelled = |available: &[u64], rates: &[f64], always| {
            let some: Vec<_> = available.iter().copied().map(Some).collect();
            after(available, &level(&some, rates, always))
        };
        assert_eq!(levelled(&[90, 0, 0], &[0.0; 3], true), [30, 30, 30]);
        assert_eq!(levelled(&[40, 30, 20], &[0.0; 3], false), [40, 30, 20], "near enough");
        assert_eq!(levelled(&[40, 40, 10], &[1.0; 3], false), [30, 30, 30]);
        // A home that sells all gets two thirds; the others keep some.
        assert_eq!(levelled(&[0, 45, 45], &[9.0, 0.0, 0.0], false), [60, 15, 15]);
        assert_eq!(levelled(&[0, 0, 0], &[1.0; 3], true), [0, 0, 0]);
    }
}
