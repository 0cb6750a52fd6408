//! Prints what Blackburn finds and sets up: `cargo run -p blackburn --example info`.

use clap::Parser;

/// Prints the device, what it can do, and which fusion providers run.
#[derive(Parser)]
struct Options {
    /// Print JSON.
    #[arg(long)]
    json: bool,

    /// The device to report on: auto, cuda, cuda:N, vulkan, vulkan:N, webgpu or flex. Without it,
    /// `BLACKBURN_DEVICE` decides, then auto.
    #[arg(long)]
    device: Option<String>,
}

fn main() -> std::process::ExitCode {
    let options = Options::parse();
    match report(&options) {
        Ok(text) => {
            println!("{text}");
            std::process::ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}

fn report(options: &Options) -> Result<String, Box<dyn std::error::Error>> {
    let mut config = blackburn::Config::from_env()?;
    if let Some(device) = &options.device {
        config.device = device.parse()?;
    }
    let report = blackburn::init_with(config)?;
    Ok(if options.json { serde_json::to_string_pretty(&report)? } else { report.to_string() })
}
