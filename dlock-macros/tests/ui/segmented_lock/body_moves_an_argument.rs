use dlock::Result;
use dlock_segment::{SegmentOutcome, segmented_lock};

#[segmented_lock(key = "stock:{order}", segments = 20)]
async fn take(order: String) -> Result<SegmentOutcome<String>> {
    Ok(SegmentOutcome::Done(order))
}

fn main() {
    let _ = take;
}
