// Runs the scenarios that a test names, in one browser:
//
//     node driver.mjs <browser> <folder of screenshots, or "">

import { serve } from "./browser.mjs";
import { scenarios as ofModels } from "./models.mjs";
import { scenarios as ofPage } from "./page.mjs";

const [executablePath, images] = process.argv.slice(2);
await serve(executablePath, images, { ...ofPage, ...ofModels });
process.exit(0);
