use dlock::Result;
use dlock_segment::{Take, segmented_lock};

#[segmented_lock(key = "stock:{order}", segments = 20)]
async fn take(order: String) -> Result<Take<String>> {
    Ok(Take::Done(order))
}

fn main() {
    let _ = take;
}
