use dlock::Result;
use dlock_segment::{Take, segmented_lock};

#[segmented_lock(segments = 20)]
async fn take(sku: u64) -> Result<Take<u64>> {
    Ok(Take::Done(sku + segment.index() as u64))
}

fn main() {
    let _ = take;
}
